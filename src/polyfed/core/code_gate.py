"""The gate: code that a text names, a file of methods or ``module.path:function``, is run only where somebody asked for it.

Whoever names code on the command line or in Python has asked for it. A run folder, a recipe, and what a node says of itself have not:
they may come from somebody else. So nothing is allowed until it is named by ``allow``, and what a file names is noted by ``note``, for
the sentence that refuses it. ``load_methods.load_file`` and ``runs/assemble.imported`` are the only places that import named code, and
both ask ``require_allowed`` first: a new way to get there that forgets to allow something is refused, not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from polyfed.errors import UntrustedCode

FILE, FUNCTION = "load", "model"
LIBRARIES = ("timm", "torchvision")
"""Before a colon, they name a network of that library, not a function to import."""


class NamedCode(NamedTuple):
    """Code by the setting that names it: a file (``load``) or a function (``model``)."""

    setting: str
    text: str

    @property
    def words(self) -> str:
        if self.setting == FILE:
            return f"run the file {self.text}"
        module, _, function = self.text.partition(":")
        return f"import the module {module} and call {function}"


_allowed: set[NamedCode] = set()
_named_in: dict[NamedCode, str] = {}


def names_function(model: str) -> bool:
    """Whether the text of a model is ``module.path:function``, not a registered name."""
    before, colon, _ = model.split("(")[0].partition(":")
    return bool(colon) and before not in LIBRARIES


def code_in(load: Iterable[str] = (), model: str | None = None) -> list[NamedCode]:
    files = [NamedCode(FILE, str(Path(file).expanduser().resolve())) for file in load]
    return files + ([NamedCode(FUNCTION, model)] if model is not None and names_function(model) else [])


def allow(code: Iterable[NamedCode]) -> None:
    """Let code be run from now on: the user named it, or trusts who did."""
    _allowed.update(code)


def note(code: Iterable[NamedCode], source: str) -> None:
    """Remember which file names code; this allows nothing."""
    _named_in.update(dict.fromkeys(code, source))


def require_allowed(code: Iterable[NamedCode]) -> None:
    """Refuse code that nobody asked for."""
    for each in code:
        if each not in _allowed:
            source = _named_in.get(each)
            who = (
                f"{source} names code of its own, and this account did not write that file"
                if source is not None
                else f"{each.setting} = {each.text!r} was not named by you"
            )
            raise UntrustedCode(
                f"{who}: it would {each.words}. Nothing was run. If you trust it, say --trust (in Python trust=True), "
                f"or name it yourself: --{each.setting} {each.text}"
            )
