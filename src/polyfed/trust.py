"""Code that a text names, a file of methods or ``module.path:function``, is run only if the user asked for it.

Naming code on the command line or in Python is asking for it. A run folder, a recipe and a node's description do not: they may come from
somebody else. A ``Trust`` is the code that may be run, and travels with the settings that name it (``Settings.trust``). It is empty until
code is added. ``core.method.load_file`` and ``runs/assemble.imported`` are the only places that import named code, and both require it:
settings from a new source that forgets to trust something are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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


def names_function(model: str) -> bool:
    """Return True if the text of a model is ``module.path:function``, not a registered name."""
    before, colon, _ = model.split("(")[0].partition(":")
    return bool(colon) and before not in LIBRARIES


def code_in(load: Iterable[str] = (), model: str | None = None) -> list[NamedCode]:
    files = [NamedCode(FILE, str(Path(file).expanduser().resolve())) for file in load]
    return files + ([NamedCode(FUNCTION, model)] if model is not None and names_function(model) else [])


@dataclass(frozen=True)
class Trust:
    """Code that may be run.

    Attributes:
        code: What the user named, or trusts somebody else to have named.
        refused: Other code with the file that names it, for the error message.
    """

    code: frozenset[NamedCode] = frozenset()
    refused: tuple[tuple[NamedCode, str], ...] = ()

    def adding(self, code: Iterable[NamedCode]) -> Trust:
        return replace(self, code=self.code.union(code))

    def refusing(self, code: Iterable[NamedCode], source: str) -> Trust:
        return replace(self, refused=(*self.refused, *((each, source) for each in code)))

    def require(self, code: Iterable[NamedCode]) -> None:
        """Refuse code that the user did not ask for."""
        for each in code:
            if each in self.code:
                continue
            source = dict(self.refused).get(each)
            who = (
                f"{source} names code of its own, and this account did not write that file"
                if source is not None
                else f"{each.setting} = {each.text!r} was not named by you"
            )
            raise UntrustedCode(
                f"{who}: it would {each.words}. Nothing was run. If you trust it, say --trust (in Python trust=True), "
                f"or name it yourself: --{each.setting} {each.text}"
            )


NOTHING = Trust()
