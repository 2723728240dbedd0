"""A method is a value: named slots, joined with ``+``, written as text.

A text means the same in Python, on the command line, in a recipe and in a report. Joining is honest: parts that
disagree, do not commute, or would be ignored raise an error that names them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, overload

from polyfed.errors import JoinError, OptionError, PolyfedError
from polyfed.registry import Recorded, Registry
from polyfed.text import Call, Option, read_sum, write_call

if TYPE_CHECKING:
    from polyfed.sharing import Rule

P = ParamSpec("P")
Grain: TypeAlias = Literal["", "per sample", "aggregate"]
GRAINS: tuple[Grain, ...] = ("", "aggregate", "per sample")
"""From what gives nothing away to what gives the most; of several parts the last one counts."""

STAGES: Mapping[str, tuple[str, ...]] = {
    "surgery": ("blocks", "norm", "convolution", "features", ""),
    "receiving": ("decode", "mix", ""),
    "inputs": ("augment", "style", ""),
    "gradients": ("correct", "mask", "", "clip", "noise"),
    "uploads": ("", "clip", "noise", "compress"),
}
"""The stages of slots whose order matters, in the order they run; "" is for parts that name none."""

_IN_ORDER = ("before_training", "after_training", "objective", "sharing", "after_round", "opening", "before_evaluation")
_ONE_OWNER = ("population", "task_loss", "predict", "outgoing", "weighting", "server_step", "round", "newcomer")
_BY_NAME = ("answers", "briefing")
SLOTS = (*STAGES, *_IN_ORDER, *_ONE_OWNER, *_BY_NAME)


@dataclass(frozen=True)
class Facts:
    """What a method needs and does, declared once; lists, tables and run-time warnings are made from it.

    Attributes:
        batch_norm: it works only on models with batch norm.
        client_state: clients keep something between rounds (cross-silo).
        full_participation: every client must take part in every round.
        smallest_batch: smallest batch it trains with; None: what the model allows (2 with batch norm, else 1).
        leaves: what leaves a client that is derived from data but is no model entry; empty: nothing.
        grain: whether that is made from single samples or from many together ("per sample", "aggregate"); empty: nothing leaves.
        messages: messages per client and round, in words.
        extra_work: extra computation in words; empty: none worth naming.
    """

    batch_norm: bool = False
    client_state: bool = False
    full_participation: bool = False
    smallest_batch: int | None = None
    leaves: str = ""
    grain: Grain = ""
    messages: str = "1"
    extra_work: str = ""

    @property
    def leaves_with_grain(self) -> str:
        """What leaves a client, and in which grain; empty: nothing."""
        return f"{self.leaves} ({self.grain})" if self.grain else self.leaves


@dataclass(frozen=True)
class Method:
    """Named slots, see ``docs/design.md``. Most methods fill one or two.

    ``alone`` says that the name stands for a whole method, not for a part that modifies one.
    ``foundation`` marks the method underneath all others; it is written out only where nothing else stands alone.
    """

    name: str
    surgery: tuple[Callable[..., Any], ...] = ()
    receiving: tuple[Callable[..., Any], ...] = ()
    inputs: tuple[Callable[..., Any], ...] = ()
    gradients: tuple[Callable[..., Any], ...] = ()
    uploads: tuple[Callable[..., Any], ...] = ()
    before_training: tuple[Callable[..., Any], ...] = ()
    after_training: tuple[Callable[..., Any], ...] = ()
    objective: tuple[Callable[..., Any], ...] = ()
    sharing: tuple[Rule, ...] = ()
    after_round: tuple[Callable[..., Any], ...] = ()
    opening: tuple[Callable[..., Any], ...] = ()
    before_evaluation: tuple[Callable[..., Any], ...] = ()
    population: Callable[..., Any] | None = None
    task_loss: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    outgoing: Callable[..., Any] | None = None
    weighting: Callable[..., Any] | None = None
    server_step: Callable[..., Any] | None = None
    round: Callable[..., Any] | None = None
    newcomer: Callable[..., Any] | None = None
    answers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    briefing: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    facts: Facts = Facts()
    alone: bool = True
    foundation: bool = False
    options: tuple[tuple[str, Option], ...] = ()
    shown: tuple[str, ...] = ()
    parts: tuple[Method, ...] = ()

    def __add__(self, other: Method) -> Method:
        if not isinstance(other, Method):
            return NotImplemented
        return join((*self.atoms, *other.atoms))

    @property
    def atoms(self) -> tuple[Method, ...]:
        """The parts it was joined from; itself if it was not."""
        return self.parts or (self,)

    def __str__(self) -> str:
        return " + ".join(write_call(atom.name, _told(atom)) for atom in self.atoms)

    @property
    def full_text(self) -> str:
        """The text with every option written out, defaults too."""
        return " + ".join(write_call(atom.name, dict(atom.options)) for atom in self.atoms)

    def fills(self, slot: str) -> bool:
        """Whether anything is in a slot."""
        return bool(getattr(self, slot))


def _told(atom: Method) -> dict[str, Option]:
    """Options worth writing: those that differ from their default, and those the method always shows."""
    if atom.name not in methods.known():
        return dict(atom.options)
    parameters = methods.find(atom.name).signature.parameters
    return {key: value for key, value in atom.options if key in atom.shown or value != parameters[key].default}


class _Methods(Registry[Method]):
    """The methods of polyfed's own folder, of installed packages (entry points) and of loaded files."""

    def discover(self) -> None:
        if self._discovered:
            return
        super().discover()
        for point in importlib.metadata.entry_points(group="polyfed.methods"):
            point.load()

    def known(self) -> Mapping[str, Recorded[Method]]:
        """What is registered so far, without discovering more."""
        return self._records

    def foundation(self) -> Method:
        """The method underneath all others, at its defaults."""
        self.discover()
        record = next(record for record in self._records.values() if record.extra["foundation"])
        made: Method = record.extra["build_with"]()
        return made


methods = _Methods("method", "polyfed.methods")


Factory: TypeAlias = Callable[P, Method]


@overload
def register(factory: Factory[P]) -> Factory[P]: ...


@overload
def register(*, shows: tuple[str, ...] = (), foundation: bool = False) -> Callable[[Factory[P]], Factory[P]]: ...


def register(factory: Factory[P] | None = None, *, shows: tuple[str, ...] = (), foundation: bool = False) -> Any:
    """Make a factory of methods listable, writable as text, and contract-tested.

    Args:
        factory: a function with literal options that returns a Method of the same name.
        shows: options that the text form always writes, even at their default.
        foundation: the method underneath all others; there is one.
    """

    def record(factory: Factory[P]) -> Factory[P]:
        @functools.wraps(factory)
        def build(*args: P.args, **kwargs: P.kwargs) -> Method:
            options = entry.bind(Call(entry.name, args, kwargs))  # type: ignore[arg-type]
            made = factory(**options)  # type: ignore[arg-type, call-arg]
            if made.name != entry.name:
                raise OptionError(f"The factory {entry.name} returned a method called {made.name}; the two names must be the same.")
            return replace(made, options=tuple(options.items()), shown=shows, foundation=foundation)

        entry = methods.add(factory, build_with=build, foundation=foundation)
        return build

    return record(factory) if factory is not None else record


def parse(text: str) -> Method:
    """Read the text form.

    Names are joined by ``+``; options are literals in brackets. The result prints in its canonical order.
    """
    atoms: list[Method] = []
    for call in read_sum(text):
        record = methods.find(call.name)
        record.bind(call)
        atoms += record.extra["build_with"](*call.positional, **call.named).atoms
    return join(atoms)


def join(atoms: Iterable[Method]) -> Method:
    """Join parts into one method, or say which two cannot be joined and why."""
    ordered = _canonical(list(atoms))
    joined: dict[str, Any] = {slot: _by_stage(ordered, slot) for slot in STAGES}
    joined |= {slot: tuple(item for atom in ordered for item in getattr(atom, slot)) for slot in _IN_ORDER}
    joined |= {slot: _one_owner(ordered, slot) for slot in _ONE_OWNER}
    joined |= {slot: _distinct_names(ordered, slot) for slot in _BY_NAME}
    joined["sharing"] = tuple(replace(rule, part=atom.name) for atom in ordered for rule in atom.sharing)
    name = " + ".join(atom.name for atom in ordered)
    method = Method(name, **joined, facts=_all_facts(ordered), alone=True, parts=tuple(ordered))
    _refuse_ignored(method)
    return method


def _canonical(atoms: list[Method]) -> list[Method]:
    names = [atom.name for atom in atoms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JoinError(f"{twice[0]} is there twice. Write each part once, with the options you want.")
    others = [atom for atom in atoms if not atom.foundation]
    base = next((atom for atom in atoms if atom.foundation), None)
    says_nothing = base is None or not any(base.fills(slot) for slot in SLOTS)
    if any(atom.alone for atom in others) and says_nothing:
        base = None
    elif base is None:
        base = methods.foundation()
    rest = sorted(others, key=lambda atom: (not _is_a_base(atom), atom.name))
    return ([base] if base is not None else []) + rest


def _is_a_base(atom: Method) -> bool:
    """Whether it reads as what the other parts are added to."""
    return atom.alone and bool(atom.sharing or atom.round or atom.population or atom.surgery)


def _by_stage(atoms: list[Method], slot: str) -> tuple[Any, ...]:
    stages = STAGES[slot]
    placed: list[tuple[int, Method, Any]] = []
    for atom in atoms:
        for item in getattr(atom, slot):
            stage = getattr(item, "stage", "")
            if stage not in stages:
                raise JoinError(f"{atom.name}: {slot} has no stage {stage!r}. There are: {', '.join(s for s in stages if s)}.")
            placed.append((stages.index(stage), atom, item))
    placed.sort(key=lambda entry: entry[0])
    for (place, atom, item), (other_place, other, other_item) in itertools.pairwise(placed):
        commute = getattr(item, "commutes", False) and getattr(other_item, "commutes", False)
        if place == other_place and atom is not other and not commute:
            stage = stages[place] or "unnamed"
            raise JoinError(
                f"{atom.name} and {other.name} both act on {slot} at the stage {stage!r}, and their order would matter. Use only one of them."
            )
    return tuple(item for _, _, item in placed)


def _one_owner(atoms: list[Method], slot: str) -> Any:
    owners = [atom for atom in atoms if getattr(atom, slot) is not None]
    if len(owners) > 1:
        raise JoinError(
            f"{owners[0].name} and {owners[1].name} both want to decide the {slot.replace('_', ' ')}. Use only one of them."
        )
    return getattr(owners[0], slot) if owners else None


def _distinct_names(atoms: list[Method], slot: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for atom in atoms:
        for name, item in getattr(atom, slot).items():
            if name in merged:
                raise JoinError(f"{owner[name]} and {atom.name} both use the name {name!r} for {slot}. Use only one of them.")
            merged[name], owner[name] = item, atom.name
    return merged


_FREE_OF_THE_ROUND = frozenset(
    {"surgery", "population", "opening", "before_evaluation", "answers", "newcomer", "predict", "round", "sharing"}
)


def _refuse_ignored(method: Method) -> None:
    """A part whose slot the round's owner does not use would be ignored."""
    if method.round is None:
        return
    owner = next(atom for atom in method.atoms if atom.round is not None)
    uses: frozenset[str] = getattr(method.round, "uses", frozenset())
    for atom in method.atoms:
        ignored = [s for s in SLOTS if atom.fills(s) and s not in uses and (s not in _FREE_OF_THE_ROUND or s == "sharing")]
        if atom is not owner and ignored:
            raise JoinError(
                f"{owner.name} holds its own rounds and does not use {ignored[0].replace('_', ' ')}, so {atom.name} would be ignored."
            )


def _all_facts(atoms: list[Method]) -> Facts:
    facts = [atom.facts for atom in atoms]
    batches = [fact.smallest_batch for fact in facts if fact.smallest_batch is not None]

    def told(key: str) -> str:
        return "; ".join(dict.fromkeys(text for fact in facts if (text := getattr(fact, key))))

    return Facts(
        batch_norm=any(fact.batch_norm for fact in facts),
        client_state=any(fact.client_state for fact in facts),
        full_participation=any(fact.full_participation for fact in facts),
        smallest_batch=max(batches) if batches else None,
        leaves=told("leaves"),
        grain=max((fact.grain for fact in facts), key=GRAINS.index, default=""),
        messages=next((fact.messages for fact in facts if fact.messages != "1"), "1"),
        extra_work=told("extra_work"),
    )


def as_method(value: str | Method) -> Method:
    """A method from its text, or a value checked as if it had been written."""
    return parse(value) if isinstance(value, str) else join(value.atoms)


def load_file(path: str | Path) -> list[str]:
    """Run a user's file of methods; returns the names it registered."""
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"There is no file {path} to load methods from.")
    before = set(methods.names())
    name = f"polyfed_loaded_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file; methods are loaded from files such as my_method.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PolyfedError:
        raise
    except Exception as error:
        raise OptionError(f"{path} could not be run: {type(error).__name__}: {error}.") from error
    new = sorted(
        (set(methods.names()) - before) | {known for known, record in methods.known().items() if record.build.__module__ == name}
    )
    if not new:
        raise OptionError(f"{path} registers no method. Decorate a function that returns a Method with @polyfed.register.")
    return new


def slot_table() -> list[str]:
    """The names of all slots, in the order of the dataclass."""
    return [item.name for item in fields(Method) if item.name in SLOTS]
