"""The sharing plan: sharing rules decide which entries are sent, uploaded and kept.

A rule selects entries by entry kind and layer type and sets some of these aspects: ``up`` (clients upload their value), ``down`` (clients
load the server's value), ``keep`` (the client's value persists between rounds) and ``reduce`` (how the values of clients are combined).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from polyfed.core.entries import AFFINE, COUNTER, HEAD, MOMENTUM, STATISTIC, Entry
from polyfed.core.reducers import Largest, Mean, Reducer
from polyfed.errors import SharingError
from polyfed.schedule import share_of


@dataclass(frozen=True)
class Select:
    """Selects entries by entry kind, layer type, or name pattern; empty means any.

    Optimizer buffers are selected only by their kind, so ``everything`` selects all entries of the model.
    """

    label: str
    kinds: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()

    def matches(self, entry: Entry) -> bool:
        """Return True if the entry is selected."""
        if entry.kind == MOMENTUM and MOMENTUM not in self.kinds:
            return False
        return (
            (not self.kinds or entry.kind in self.kinds)
            and (not self.layers or entry.layer in self.layers)
            and (not self.names or any(fnmatchcase(entry.name, pattern) for pattern in self.names))
        )


everything = Select("every entry")
batch_norm = Select("batch norm", layers=frozenset({"batch_norm"}))
bn_affine = Select("batch-norm affine", kinds=frozenset({AFFINE}), layers=frozenset({"batch_norm"}))
bn_statistics = Select("batch-norm statistics", kinds=frozenset({STATISTIC, COUNTER}), layers=frozenset({"batch_norm"}))
head = Select("the head", kinds=frozenset({HEAD}))
momentum_buffers = Select("optimizer buffers", kinds=frozenset({MOMENTUM}))


@dataclass(frozen=True)
class Rule:
    """Sets aspects of the selected entries; ``None`` does not change an aspect.

    Attributes:
        select: Entries that the rule applies to.
        up: Clients upload their value.
        down: Clients load the server's value.
        keep: The client's value persists between rounds.
        reduce: How the values of clients are combined.
        since: Last round before the rule applies: an integer, or a fraction of all rounds.
        optional: The rule may match nothing, such as optimizer buffers if the optimizer has none.
        part: Name of the method part that contains the rule. Set when methods are joined.
    """

    select: Select
    up: bool | None = None
    down: bool | None = None
    keep: bool | None = None
    reduce: Reducer | None = None
    since: int | float | None = None
    optional: bool = False
    part: str = ""

    def starts_after(self, rounds: int) -> int:
        """Return the last round in which the rule does not apply yet."""
        if self.since is None:
            return 0
        return share_of(self.since, rounds) if isinstance(self.since, float) else self.since


def keep_local(select: Select) -> Rule:
    """Return a rule for entries that never leave the client and persist there."""
    return Rule(select, up=False, down=False, keep=True)


def upload_only(select: Select) -> Rule:
    """Return a rule for entries that are uploaded and never sent back."""
    return Rule(select, up=True, down=False, keep=True)


def reduce_with(select: Select, reducer: Reducer) -> Rule:
    """Return a rule for entries that are combined by a custom reducer instead of the mean."""
    return Rule(select, reduce=reducer)


@dataclass(frozen=True)
class Travel:
    """Aspects of one entry in one phase."""

    up: bool = True
    down: bool = True
    keep: bool = False
    reduce: Reducer = Mean()

    @property
    def words(self) -> str:
        """Description for tables."""
        if self.up and self.down:
            return "shared"
        if self.up:
            return "uploaded, never sent back"
        if self.down:
            return "sent, not uploaded"
        return "local" if self.keep else "reset each round"


_ASPECTS = ("up", "down", "keep", "reduce")


@dataclass(frozen=True)
class Phase:
    """Plan for consecutive rounds."""

    travels: Mapping[str, Travel]

    @cached_property
    def up(self) -> tuple[str, ...]:
        """Names of entries that clients upload."""
        return tuple(name for name, travel in self.travels.items() if travel.up)

    @cached_property
    def down(self) -> tuple[str, ...]:
        """Names of entries that the server sends."""
        return tuple(name for name, travel in self.travels.items() if travel.down)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Names of entries whose value persists at the client."""
        return tuple(name for name, travel in self.travels.items() if travel.keep)

    @cached_property
    def groups(self) -> dict[Reducer, tuple[str, ...]]:
        """Uploaded entries by reducer."""
        groups: dict[Reducer, list[str]] = {}
        for name in self.up:
            groups.setdefault(self.travels[name].reduce, []).append(name)
        return {reducer: tuple(names) for reducer, names in groups.items()}


class Plan:
    """Which entries are sent, uploaded and kept in each round."""

    def __init__(self, entries: Mapping[str, Entry], rules: Sequence[Rule], rounds: int) -> None:
        self.entries = dict(entries)
        self.rules = tuple(rules)
        self.rounds = rounds
        _check_selections(self.entries, self.rules)
        starts = sorted({0, *(rule.starts_after(rounds) for rule in self.rules)})
        self.phases = {start: self._phase(start) for start in starts}
        _check_reductions(self)

    def at(self, round_number: int) -> Phase:
        """Return the phase of a round."""
        start = max((s for s in self.phases if s < max(round_number, 1)), default=0)
        return self.phases[start]

    def _phase(self, start: int) -> Phase:
        active = [rule for rule in self.rules if rule.starts_after(self.rounds) <= start]
        travels = {name: _travel(entry, active) for name, entry in self.entries.items()}
        for name, entry in self.entries.items():
            if entry.of is not None and not (travels[entry.of].up and travels[entry.of].down):
                # A buffer stays with a parameter that is not exchanged.
                travel = travels[name]
                travels[name] = replace(travel, up=False, down=False, keep=travel.keep or travel.up or travel.down)
        return Phase(travels)

    @property
    def has_local_entries(self) -> bool:
        """True if a client's model differs from the server's in the last phase."""
        last = self.phases[max(self.phases)]
        return any(not travel.down and travel.keep and self.entries[name].of is None for name, travel in last.travels.items())

    @property
    def local_names(self) -> tuple[str, ...]:
        """Model entries that are neither sent nor uploaded in the last phase."""
        last = self.phases[max(self.phases)]
        return tuple(n for n, t in last.travels.items() if t.keep and not t.down and not t.up and self.entries[n].of is None)

    @property
    def unsent_names(self) -> tuple[str, ...]:
        """Model entries that the server does not send in the last phase."""
        last = self.phases[max(self.phases)]
        return tuple(n for n, t in last.travels.items() if not t.down and self.entries[n].of is None)

    @property
    def keeps_state(self) -> bool:
        """True if clients keep entries between rounds."""
        return any(phase.kept for phase in self.phases.values())


def _travel(entry: Entry, rules: Iterable[Rule]) -> Travel:
    start = Travel()
    if entry.kind == MOMENTUM:
        start = Travel(up=False, down=False, keep=False)
    elif not entry.dtype.is_floating_point:
        start = Travel(reduce=Largest())
    chosen: dict[str, tuple[object, Rule]] = {}
    for rule in rules:
        if not rule.select.matches(entry):
            continue
        for aspect in _ASPECTS:
            value = getattr(rule, aspect)
            if value is None:
                continue
            if aspect in chosen and chosen[aspect][0] != value:
                _raise_conflict(entry, aspect, chosen[aspect][1], rule)
            chosen[aspect] = (value, rule)
    return replace(start, **{aspect: value for aspect, (value, _) in chosen.items()})  # type: ignore[arg-type]


def _raise_conflict(entry: Entry, aspect: str, one: Rule, other: Rule) -> None:
    said = {
        "up": "whether it is uploaded",
        "down": "whether it is sent",
        "keep": "whether it is kept",
        "reduce": "how it is reduced",
    }
    raise SharingError(
        f"{one.part or 'one rule'} and {other.part or 'another rule'} disagree on {entry.name}: {said[aspect]}. Use only one of them."
    )


def _check_selections(entries: Mapping[str, Entry], rules: Iterable[Rule]) -> None:
    for rule in rules:
        if not rule.optional and not any(rule.select.matches(entry) for entry in entries.values()):
            kinds = sorted({entry.layer for entry in entries.values()})
            raise SharingError(
                f"{rule.part or 'A rule'} has no effect: the model has no {rule.select.label} (it has: {', '.join(kinds)}). "
                f"Use a model with {rule.select.label}, or remove {rule.part or 'the rule'}."
            )


def _check_reductions(plan: Plan) -> None:
    for rule in plan.rules:
        if rule.reduce is None:
            continue
        names = [name for name, entry in plan.entries.items() if rule.select.matches(entry)]
        if not any(phase.travels[name].up for phase in plan.phases.values() for name in names):
            raise SharingError(
                f"{rule.part or 'A rule'} has no effect: it aggregates entries that are not uploaded ({rule.select.label}). Remove it."
            )


def check_none_redundant(entries: Mapping[str, Entry], rules: Sequence[Rule], rounds: int, only_share: Collection[str]) -> None:
    """Reject a part of ``only_share`` whose sharing rules have no effect in combination with the other parts."""
    parts = {rule.part for rule in rules}
    if len(parts) < 2:
        return
    whole = Plan(entries, rules, rounds)
    for part in sorted(parts & set(only_share)):
        rest = Plan(entries, [rule for rule in rules if rule.part != part], rounds)
        if all(whole.at(r).travels == rest.at(r).travels for r in (*(s + 1 for s in whole.phases), *(s + 1 for s in rest.phases))):
            others = ", ".join(sorted(parts - {part}))
            raise SharingError(f"{part} has no effect in combination with {others}. Remove one of them.")
