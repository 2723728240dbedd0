"""Trust in code: method files and ``module.path:function`` run only if the user named them, or passed ``--trust``.

Run folders, recipes and node descriptions may come from another user, so the code they name is not trusted. ``Settings.trust`` lists the
trusted code. ``core.method.load_file`` and ``runs/assemble.imported`` are the only functions that import named code, and both check it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from polyfed.errors import UntrustedCode

FILE, FUNCTION = "load", "model"
LIBRARIES = ("timm", "torchvision")
"""Prefixes of networks from a library. They do not name a function to import."""


class NamedCode(NamedTuple):
    """Code named by a setting: a file (``load``) or a function (``model``)."""

    setting: str
    text: str

    @property
    def words(self) -> str:
        if self.setting == FILE:
            return f"run the file {self.text}"
        module, _, function = self.text.partition(":")
        return f"import the module {module} and call {function}"


def names_function(model: str) -> bool:
    """Return True if a model is ``module.path:function`` instead of a registered name."""
    before, colon, _ = model.split("(")[0].partition(":")
    return bool(colon) and before not in LIBRARIES


def code_in(load: Iterable[str] = (), model: str | None = None) -> list[NamedCode]:
    files = [NamedCode(FILE, str(Path(file).expanduser().resolve())) for file in load]
    return files + ([NamedCode(FUNCTION, model)] if model is not None and names_function(model) else [])


@dataclass(frozen=True)
class Trust:
    """Code that may be run.

    Attributes:
        code: Code named by the user, or by a file that the user trusts.
        refused: Untrusted code and the file that names it, for error messages.
    """

    code: frozenset[NamedCode] = frozenset()
    refused: tuple[tuple[NamedCode, str], ...] = ()

    def adding(self, code: Iterable[NamedCode]) -> Trust:
        return replace(self, code=self.code.union(code))

    def refusing(self, code: Iterable[NamedCode], source: str) -> Trust:
        return replace(self, refused=(*self.refused, *((each, source) for each in code)))

    def require(self, code: Iterable[NamedCode]) -> None:
        """Raise an error for code that is not trusted."""
        for each in code:
            if each in self.code:
                continue
            source = dict(self.refused).get(each)
            reason = (
                f"{source} refers to code, and this user account did not write that file"
                if source is not None
                else f"{each.setting} = {each.text!r} was not named by you"
            )
            raise UntrustedCode(
                f"{reason}. It would {each.words}. No code was run. If you trust the code, pass --trust (in Python: trust=True), "
                f"or --{each.setting} {each.text}"
            )


NOTHING = Trust()
