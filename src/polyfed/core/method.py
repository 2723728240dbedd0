"""A method is a value: named slots, joined with ``+``, written as text.

A text means the same in Python, on the command line, in a recipe and in a report. Parts that conflict,
do not commute, or would be ignored raise an error that names them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, overload

from polyfed.core import slots
from polyfed.core.part import joined_slots, refuse_ignored
from polyfed.core.slots import SLOTS
from polyfed.errors import JoinError, OptionError, TextError
from polyfed.registry import Recorded, Registry
from polyfed.text import Call, Option, read_sum, write_call

if TYPE_CHECKING:
    from polyfed.core.sharing import Rule
    from polyfed.extras import Extra

P = ParamSpec("P")
Granularity: TypeAlias = Literal["", "per sample", "aggregate"]
GRANULARITIES: tuple[Granularity, ...] = ("", "aggregate", "per sample")
"""From what gives nothing away to what gives the most; of several parts the last one counts."""


@dataclass(frozen=True)
class Facts:
    """What a method needs and does, declared once; lists, tables and run-time warnings are made from it.

    Attributes:
        batch_norm: it works only on models with batch norm, which it may take out; a default model is chosen to have some.
        class_labels: it needs one class label for each example, so it works only where the task has them.
        client_state: clients keep something between rounds (cross-silo).
        full_participation: every client must take part in every round.
        smallest_batch: smallest batch it trains with; None: what the model allows (2 with batch norm, else 1).
        data_derived_uploads: what leaves a client that is derived from data but is no model entry; empty: nothing.
        granularity: whether that is made from single samples or from many together ("per sample", "aggregate"); empty: nothing leaves.
        messages: messages per client and round, in words.
        extra_work: extra computation in words; empty: none worth naming.
        protects: the unit of its differential privacy: samples, or clients; empty: it promises none.
        noise_at: who adds the noise of that promise.
        epsilon: the budget of that promise.
        delta: the probability with which that promise may fail.
        withholds_loss: clients do not report their training loss, nor that it is not finite: its updates bound what such a loss does.
        noise_from: where the noise comes from: the run's seed (everybody who knows it can take the noise off again), or the system's generator.
    """

    batch_norm: bool = False
    class_labels: bool = False
    client_state: bool = False
    full_participation: bool = False
    smallest_batch: int | None = None
    data_derived_uploads: str = ""
    granularity: Granularity = ""
    messages: str = "1"
    extra_work: str = ""
    protects: Literal["", "samples", "clients"] = ""
    noise_at: Literal["", "client", "server"] = ""
    noise_from: Literal["", "seed", "system"] = ""
    epsilon: float = 0.0
    delta: float = 0.0
    withholds_loss: bool = False

    @property
    def uploads_with_granularity(self) -> str:
        """What leaves a client beyond model entries, and in which granularity; empty: nothing."""
        uploads = self.data_derived_uploads
        return f"{uploads} ({self.granularity})" if self.granularity else uploads

    @classmethod
    def of_all(cls, facts: Sequence[Facts]) -> Facts:
        """The facts of several parts together: texts side by side, the largest number, else the first that is no default."""
        joined: dict[str, Any] = {}
        for item in fields(cls):
            told = [value for fact in facts if (value := getattr(fact, item.name)) != item.default]
            if item.name in ("data_derived_uploads", "extra_work"):
                joined[item.name] = "; ".join(dict.fromkeys(told))
            elif item.name == "granularity":
                joined[item.name] = max(told, key=GRANULARITIES.index, default="")
            elif told:
                joined[item.name] = told[0] if isinstance(told[0], str) else max(told)
        return cls(**joined)


@dataclass(frozen=True)
class Method:
    """Named slots, see ``core/slots.py``. Most methods fill one or two.

    ``standalone`` says that the name stands for a whole method, not for a part that modifies one.
    ``is_base`` marks the method that all others modify; it is written out only where no other part is standalone.
    """

    name: str
    surgery: tuple[slots.Surgery | slots.HeadSurgery, ...] = ()
    receiving: tuple[slots.Receiving, ...] = ()
    inputs: tuple[slots.Inputs, ...] = ()
    gradients: tuple[slots.GradientChange, ...] = ()
    uploads: tuple[slots.Upload, ...] = ()
    before_training: tuple[slots.AroundTraining, ...] = ()
    after_training: tuple[slots.AroundTraining, ...] = ()
    objective: tuple[slots.Term, ...] = ()
    sharing: tuple[Rule, ...] = ()
    after_round: tuple[slots.AfterRound, ...] = ()
    setup: tuple[slots.ExchangeFunction, ...] = ()
    before_evaluation: tuple[slots.ExchangeFunction, ...] = ()
    population: slots.Population | None = None
    sampling: slots.Sampling | None = None
    batch_gradient: slots.BatchGradient | None = None
    schedule: slots.RateFactor | None = None
    task_loss: slots.Term | None = None
    predict: slots.Predict | None = None
    outgoing: slots.Outgoing | None = None
    weighting: slots.Weighting | None = None
    server_step: slots.ServerStep | None = None
    round: slots.ExchangeFunction | None = None
    newcomer: slots.NewcomerExchange | None = None
    answers: Mapping[str, slots.Answer] = field(default_factory=dict)
    send_extras: Mapping[str, slots.SendExtras] = field(default_factory=dict)
    reply_extras: Mapping[str, Mapping[str, Extra]] = field(default_factory=dict)
    reply_entries: Mapping[str, slots.ReplyEntries] = field(default_factory=dict)
    facts: Facts = Facts()
    standalone: bool = True
    is_base: bool = False
    options: tuple[tuple[str, Option], ...] = ()
    always_written: tuple[str, ...] = ()
    joined_from: tuple[Method, ...] = ()

    def __add__(self, other: Method) -> Method:
        if not isinstance(other, Method):
            return NotImplemented
        return join((*self.parts, *other.parts))

    @property
    def parts(self) -> tuple[Method, ...]:
        """The parts it was joined from; itself if it was not."""
        return self.joined_from or (self,)

    def __str__(self) -> str:
        return " + ".join(write_call(part.name, _written_options(part)) for part in self.parts)

    @property
    def full_text(self) -> str:
        """The text with every option written out, defaults too."""
        return " + ".join(write_call(part.name, dict(part.options)) for part in self.parts)

    def fills(self, slot: str) -> bool:
        """Whether anything is in a slot."""
        return bool(getattr(self, slot))

    def items(self, slot: str) -> tuple[Any, ...]:
        """Return what is in a slot, whether it holds one value, a tuple or a mapping."""
        filled = getattr(self, slot)
        if isinstance(filled, Mapping):
            return tuple(filled.values())
        return filled if isinstance(filled, tuple) else () if filled is None else (filled,)

    @property
    def filled_slots(self) -> list[str]:
        """The names of the slots it fills, in the order of the table."""
        return [slot for slot in SLOTS if self.fills(slot)]


def _written_options(part: Method) -> dict[str, Option]:
    """Options worth writing: those that differ from their default, and those the method always shows."""
    if part.name not in methods.known():
        return dict(part.options)
    parameters = methods.find(part.name).signature.parameters
    return {key: value for key, value in part.options if key in part.always_written or value != parameters[key].default}


class _Methods(Registry[Method]):
    """The methods that installed packages register by an entry point, polyfed's own folder among them, and those of loaded files."""

    def known(self) -> Mapping[str, Recorded[Method]]:
        """What is registered so far, without discovering more."""
        return self._records

    def base(self) -> Method:
        """The method that all others modify, at its defaults."""
        self.discover()
        record = next(record for record in self._records.values() if record.extra["is_base"])
        made: Method = record.extra["build_with"]()
        return made


methods = _Methods("method", entry_points="polyfed.methods")


Factory: TypeAlias = Callable[P, Method]


@overload
def register(factory: Factory[P]) -> Factory[P]: ...


@overload
def register(
    *,
    shows: tuple[str, ...] = (),
    base: bool = False,
    shared_options: Mapping[str, str] | None = None,
    absent: Mapping[str, Option] | None = None,
) -> Callable[[Factory[P]], Factory[P]]: ...


def register(
    factory: Factory[P] | None = None,
    *,
    shows: tuple[str, ...] = (),
    base: bool = False,
    shared_options: Mapping[str, str] | None = None,
    absent: Mapping[str, Option] | None = None,
) -> Any:
    """Make a factory of methods listable, writable as text, and contract-tested.

    Args:
        factory: a function with literal options that returns a Method of the same name.
        shows: options that the text form always writes, even at their default.
        base: the method that all others modify; there is one.
        shared_options: texts of options that several factories have; they are added to the Args section of the docstring.
        absent: the value that an option has in run folders written before the method had it, if that is not the default.
    """

    def record(factory: Factory[P]) -> Factory[P]:
        if shared_options:
            factory.__doc__ = _with_options(factory, shared_options)

        @functools.wraps(factory)
        def build(*args: P.args, **kwargs: P.kwargs) -> Method:
            options = entry.bind(Call(entry.name, args, kwargs))  # type: ignore[arg-type]
            made = factory(**options)  # type: ignore[arg-type, call-arg]
            if made.name != entry.name:
                raise OptionError(f"The factory {entry.name} returned a method called {made.name}; the two names must be the same.")
            return replace(made, options=tuple(options.items()), always_written=shows, is_base=base)

        entry = methods.add(factory, build_with=build, is_base=base, absent=absent or {})
        return build

    return record(factory) if factory is not None else record


def _with_options(factory: Factory[P], texts: Mapping[str, str]) -> str:
    strange = sorted(set(texts) - set(inspect.signature(factory).parameters))
    if strange:
        raise OptionError(f"The factory {factory.__name__} has no option {strange[0]!r} that the shared text could describe.")
    doc, section, reference = (inspect.getdoc(factory) or "").partition("\n\nReference:\n")
    heading = [] if "\nArgs:\n" in doc else ["", "Args:"]
    return "\n".join([doc, *heading, *(f"    {name}: {text}" for name, text in texts.items())]) + section + reference


def parse(text: str) -> Method:
    """Read the text form.

    Names are joined by ``+``; options are literals in brackets. The result prints in its canonical order.
    """
    parts: list[Method] = []
    for call in read_sum(text):
        record = methods.find(call.spelled)
        record.bind(call)
        parts += record.extra["build_with"](*call.positional, **call.named).parts
    return join(parts)


def read_recorded(text: str) -> str:
    """Return a method text from a run folder with the options that the method got later, at the values that the run had."""
    try:
        calls = read_sum(text)
    except TextError:
        return text
    written = [call.spelled in methods and not call.positional for call in calls]
    added = [methods.find(call.spelled).extra["absent"] if one else {} for call, one in zip(calls, written, strict=True)]
    missing = [{key: one[key] for key in one if key not in call.named} for call, one in zip(calls, added, strict=True)]
    if not any(missing):
        return text
    return " + ".join(write_call(call.spelled, {**call.named, **more}) for call, more in zip(calls, missing, strict=True))


def join(parts: Iterable[Method]) -> Method:
    """Join parts into one method, or say which two cannot be joined and why."""
    ordered = _canonical(list(parts))
    name = " + ".join(part.name for part in ordered)
    facts = Facts.of_all([part.facts for part in ordered])
    method = Method(name, **joined_slots(ordered), facts=facts, standalone=True, joined_from=tuple(ordered))
    refuse_ignored(method)
    return method


def _canonical(parts: list[Method]) -> list[Method]:
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JoinError(f"{twice[0]} is there twice. Write each part once, with the options you want.")
    others = [part for part in parts if not part.is_base]
    base = next((part for part in parts if part.is_base), None)
    if any(part.standalone for part in others) and (base is None or not base.filled_slots):
        base = None
    elif base is None:
        base = methods.base()
    rest = sorted(others, key=lambda part: (not _comes_first(part), part.name))
    return ([base] if base is not None else []) + rest


def _comes_first(part: Method) -> bool:
    """Whether it reads as what the other parts are added to."""
    return part.standalone and bool(part.sharing or part.round or part.population or part.surgery)


def as_method(value: str | Method) -> Method:
    """A method from its text, or a value checked as if it had been written."""
    return parse(value) if isinstance(value, str) else join(value.parts)
