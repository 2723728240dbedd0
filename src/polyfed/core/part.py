"""``Part``: declarations of the code in a slot, and joining the slots of several parts.

A slot contains plain functions, which declare nothing, and instances of ``Part``. ``declare`` turns a function into a ``Part``. Parts that
conflict, or have no effect, raise an error that names them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from polyfed.core.slots import SLOTS, Join
from polyfed.errors import JoinError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.method import Method
    from polyfed.core.server import Server
    from polyfed.core.sharing import Rule
    from polyfed.core.workbench import Workbench


P = ParamSpec("P")
R = TypeVar("R")


class Part:
    """Base class of slot items with declarations. Subclasses implement ``__call__`` as the slot's protocol defines it.

    Attributes:
        stage: Stage in which the part runs, for slots with stages (see ``core/slots.py``).
        commutes: True if its order relative to another commuting part of the same stage does not matter.
        reads_data: False if it uses only weights, gradients and what the server sent. Decides what differential privacy covers.
        needs_features: ``step.features`` is filled (``objective``, ``gradients``, ``task_loss``).
        needs_head: It receives the path of the head as a second argument (``surgery``).
        mixes_samples: The output for one sample depends on other samples of the batch (``surgery``).
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
        """Raise an error if the part does not work with this model, plan or settings. Called once before the run."""

    def notice(self, bench: Workbench, clients: int) -> str:
        """Return a notice for the user before the run, or an empty string."""
        return ""

    def frozen_after(self, rounds: int) -> int | None:
        """Return the last round in which batch-norm statistics change, or None if the part freezes none (``before_training``)."""
        return None

    def undo(self, server: Server, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Invert ``__call__`` at the server. Entries that cannot be decoded are returned unchanged (``uploads``)."""
        return entries


NEUTRAL = Part()
DECLARATIONS = frozenset(name for name in vars(Part) if not name.startswith("_"))
_ALIKE = 0.85
"""Similarity above which a name counts as a misspelling of another."""


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
    """Turn a function into a ``Part`` with these attributes.

    Raises:
        TypeError: If ``Part`` has no such attribute.
    """
    for name in declarations:
        if name not in DECLARATIONS:
            raise TypeError(f"A part cannot declare {name!r}. {nearest(name, DECLARATIONS)}")
    return lambda function: DeclaredFunction(function, declarations)


def declared(item: object) -> Part:
    """Return the declarations of a slot item. Functions, rules and empty slots declare nothing."""
    return item if isinstance(item, Part) else NEUTRAL


def refuse_ineffective(item: Any, where: str) -> None:
    """Reject declarations that have no effect: without the base class ``Part``, or misspelt.

    Dataclass fields, upper-case constants and private names are allowed. So are methods, unless their name resembles one of ``Part``.

    Raises:
        JoinError: If a declaration has no effect.
    """
    if isinstance(item, DeclaredFunction) or not (callable(item) or isinstance(item, Part)):
        return
    if inspect.isfunction(item):
        unread = sorted(name for name in vars(item) if difflib.get_close_matches(name, DECLARATIONS, cutoff=_ALIKE))
        if unread:
            raise JoinError(
                f"{where}: the attribute {unread[0]!r} of the function {item.__name__} has no effect. Use the decorator @polyfed.declare(...)."
            )
    elif not isinstance(item, Part):
        if not inspect.isroutine(item) and not isinstance(item, functools.partial):
            raise JoinError(f"{where}: {type(item).__name__} must have the base class polyfed.Part, or be a function.")
    else:
        for name in _unknown_declarations(type(item)):
            raise JoinError(
                f"{where}: {type(item).__name__} declares {name!r}, which is not an attribute of polyfed.Part. {nearest(name, DECLARATIONS)} "
                "Make other values dataclass fields, or private."
            )


def _unknown_declarations(kind: type) -> Iterator[str]:
    """Yield public class attributes that ``Part`` does not have, and methods whose name resembles one of its methods."""
    known = {*DECLARATIONS, *getattr(kind, "__dataclass_fields__", ())}
    hooks = [name for name in DECLARATIONS if callable(getattr(Part, name))]
    own = {name: value for base in kind.__mro__ if base not in Part.__mro__ for name, value in vars(base).items()}
    for name, value in own.items():
        if name in known or name.startswith("_") or name.isupper():
            continue
        is_method = callable(value) or isinstance(value, property | functools.cached_property | classmethod | staticmethod)
        if not is_method or difflib.get_close_matches(name, hooks, cutoff=_ALIKE):
            yield name


def joined_slots(parts: Sequence[Method]) -> dict[str, Any]:
    for part in parts:
        for name in SLOTS:
            for item in part.items(name):
                refuse_ineffective(item, f"{part.name}, {name}")
    return {name: _JOINERS[slot.join](parts, name) for name, slot in SLOTS.items()}


def _by_stage(parts: Sequence[Method], slot: str) -> tuple[Any, ...]:
    stages = SLOTS[slot].stages
    placed: list[tuple[int, Method, Any]] = []
    for part in parts:
        for item in getattr(part, slot):
            stage = declared(item).stage
            if stage not in stages:
                raise JoinError(f"{part.name}: {slot} has no stage {stage!r}. Choose from: {', '.join(s for s in stages if s)}.")
            placed.append((stages.index(stage), part, item))
    placed.sort(key=lambda entry: entry[0])
    for (place, part, item), (other_place, other, other_item) in itertools.pairwise(placed):
        commute = declared(item).commutes and declared(other_item).commutes
        if place == other_place and part is not other and not commute:
            stage = stages[place] or "unnamed"
            raise JoinError(
                f"{part.name} and {other.name} both act on {slot} at stage {stage!r}, and their order matters. Use only one of them."
            )
    return tuple(item for _, _, item in placed)


def _in_order(parts: Sequence[Method], slot: str) -> tuple[Any, ...]:
    return tuple(item for part in parts for item in getattr(part, slot))


def _rules(parts: Sequence[Method], slot: str) -> tuple[Rule, ...]:
    # Conflicts between rules are detected when the plan is built.
    return tuple(replace(rule, part=part.name) for part in parts for rule in getattr(part, slot))


def _one_owner(parts: Sequence[Method], slot: str) -> Any:
    owners = [part for part in parts if getattr(part, slot) is not None]
    if len(owners) > 1:
        raise JoinError(f"{owners[0].name} and {owners[1].name} both define the slot {slot}. Use only one of them.")
    return getattr(owners[0], slot) if owners else None


def _distinct_names(parts: Sequence[Method], slot: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for part in parts:
        for name, item in getattr(part, slot).items():
            if name in merged:
                raise JoinError(f"{owner[name]} and {part.name} both use the name {name!r} for {slot}. Use only one of them.")
            merged[name], owner[name] = item, part.name
    return merged


def _distinct_by_question(parts: Sequence[Method], slot: str) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    owner: dict[tuple[str, str], str] = {}
    for part in parts:
        for question, items in getattr(part, slot).items():
            for name, item in items.items():
                if (question, name) in owner:
                    raise JoinError(
                        f"{owner[question, name]} and {part.name} both use the name {name!r} for {slot} of {question!r}. Use only one of them."
                    )
                merged.setdefault(question, {})[name], owner[question, name] = item, part.name
    return merged


_JOINERS: Mapping[Join, Callable[[Sequence[Method], str], Any]] = {
    Join.BY_STAGE: _by_stage,
    Join.IN_ORDER: _in_order,
    Join.SUMMED: _in_order,
    Join.MERGED: _rules,
    Join.ONE_OWNER: _one_owner,
    Join.DISTINCT_NAMES: _distinct_names,
    Join.DISTINCT_BY_QUESTION: _distinct_by_question,
}


def refuse_ignored(method: Method) -> None:
    """Reject a part that fills a slot that the custom round does not use."""
    if method.round is None:
        return
    owner = next(part for part in method.parts if part.round is not None)
    uses = declared(method.round).uses
    for part in method.parts:
        ignored = [name for name in part.filled_slots if SLOTS[name].must_be_used and name not in uses]
        if part is not owner and ignored:
            raise JoinError(
                f"{part.name} has no effect with {owner.name}, whose custom round does not use {ignored[0].replace('_', ' ')}. "
                f"Remove {part.name}."
            )
