"""``Part``: what the code in a slot may declare about itself.

A slot holds plain functions, which declare nothing, and instances of ``Part``. ``declare`` makes a ``Part`` of a function.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from polyfed.errors import JoinError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.server import Server
    from polyfed.core.workbench import Workbench

P = ParamSpec("P")
R = TypeVar("R")


class Part:
    """Base class of what fills a slot and declares something. Subclasses write ``__call__`` as the slot's protocol says.

    Attributes:
        stage: Stage in which it runs, for slots with stages (see ``core/slots.py``).
        commutes: True if its order relative to another commuting part of the same stage does not matter.
        reads_data: False if it uses only weights, gradients and what the server sent. Decides what differential privacy covers.
        needs_features: ``step.features`` is filled (``objective``, ``gradients``, ``task_loss``).
        needs_head: It receives the path of the head as a second argument (``surgery``).
        mixes_samples: It makes the output for one sample depend on others of the batch (``surgery``).
        runs_model: It runs the model itself (``objective``).
        runs_evaluation: It evaluates the model on the client's data (``before_training``).
        account_key: Key in the client's memory under which its privacy ledger is stored (``after_training``).
        is_capped: Its weights respect ``--max-weight-share`` (``weighting``).
        uses: Slots that the exchange uses; a part that fills another one is an error (``round``).
        trains: Clients reply by training, so ``uploads`` and the extras of "train" apply (``reply_entries``).
    """

    stage: str = ""
    commutes: bool = False
    reads_data: bool = True
    needs_features: bool = False
    needs_head: bool = False
    mixes_samples: bool = False
    runs_model: bool = False
    runs_evaluation: bool = False
    account_key: str = ""
    is_capped: bool = False
    uses: frozenset[str] = frozenset()
    trains: bool = False

    def check(self, bench: Workbench) -> None:
        """Raise an error if it cannot work with this model, plan or settings. Called once before the run."""

    def notice(self, bench: Workbench, clients: int) -> str:
        """Return what the user should know before the run; empty: nothing."""
        return ""

    def frozen_after(self, rounds: int) -> int | None:
        """Return the last round in which batch-norm statistics change; None: it freezes none (``before_training``)."""
        return None

    def undo(self, server: Server, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Decode at the server what ``__call__`` did to the entries; those it cannot decode stay (``uploads``)."""
        return entries


NEUTRAL = Part()
DECLARATIONS = frozenset(name for name in vars(Part) if not name.startswith("_"))
_ALIKE = 0.85
"""Similarity of two names from which one is taken for the other, misspelt."""


class DeclaredFunction(Part, Generic[P, R]):
    """A function with declarations. It is pickled by its name, like any function."""

    def __init__(self, function: Callable[P, R], declarations: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        vars(self).update(declarations)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.function.__qualname__


def declare(**declarations: Any) -> Callable[[Callable[P, R]], DeclaredFunction[P, R]]:
    """Make a ``Part`` of a function, with these attributes of ``Part``.

    Raises:
        TypeError: If ``Part`` has no such attribute.
    """
    for name in declarations:
        if name not in DECLARATIONS:
            raise TypeError(f"A part cannot declare {name!r}. {nearest(name, DECLARATIONS)}")
    return lambda function: DeclaredFunction(function, declarations)


def declared(item: object) -> Part:
    """Return what an item of a slot declares; functions, rules and empty slots declare nothing."""
    return item if isinstance(item, Part) else NEUTRAL


def refuse_unread(item: Any, where: str) -> None:
    """Refuse declarations that would be ignored: without the base class ``Part``, or misspelt.

    Fields of a dataclass, constants in capitals and private names are free. Methods are helpers, unless named almost like one of ``Part``.

    Raises:
        JoinError: With the place and the attribute.
    """
    if isinstance(item, DeclaredFunction) or not (callable(item) or isinstance(item, Part)):
        return
    if inspect.isfunction(item):
        unread = sorted(name for name in vars(item) if difflib.get_close_matches(name, DECLARATIONS, cutoff=_ALIKE))
        if unread:
            raise JoinError(
                f"{where}: the attribute {unread[0]!r} of the function {item.__name__} is not read. Write @polyfed.declare(...) above it."
            )
    elif not isinstance(item, Part):
        if not inspect.isroutine(item) and not isinstance(item, functools.partial):
            raise JoinError(f"{where}: {type(item).__name__} must have the base class polyfed.Part, or be a function.")
    else:
        for name in _unknown_declarations(type(item)):
            raise JoinError(
                f"{where}: {type(item).__name__} declares {name!r}, which a part cannot. {nearest(name, DECLARATIONS)} "
                "Other values are fields of the dataclass, or private."
            )


def _unknown_declarations(kind: type) -> Iterator[str]:
    """Yield public class attributes that ``Part`` does not have, and methods that are named almost like one of its methods."""
    known = {*DECLARATIONS, *getattr(kind, "__dataclass_fields__", ())}
    hooks = [name for name in DECLARATIONS if callable(getattr(Part, name))]
    own = {name: value for base in kind.__mro__ if base not in Part.__mro__ for name, value in vars(base).items()}
    for name, value in own.items():
        if name in known or name.startswith("_") or name.isupper():
            continue
        is_method = callable(value) or isinstance(value, property | functools.cached_property | classmethod | staticmethod)
        if not is_method or difflib.get_close_matches(name, hooks, cutoff=_ALIKE):
            yield name
