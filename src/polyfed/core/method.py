"""A method is a value: named slots, joined with ``+``, written as an expression.

An expression means the same in Python, on the command line, in a recipe and in a report. Parts that conflict, do not commute, or have no
effect raise an error that names them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, overload

from polyfed.core import slots
from polyfed.core.part import joined_slots, refuse_ignored
from polyfed.core.slots import SLOTS
from polyfed.errors import JoinError, OptionError, PolyfedError, TextError
from polyfed.registry import Recorded, Registry
from polyfed.text import Call, Option, read_sum, write_call
from polyfed.trust import Trust, code_in

if TYPE_CHECKING:
    from polyfed.core.sharing import Rule
    from polyfed.extras import Extra

P = ParamSpec("P")
Granularity: TypeAlias = Literal["", "per sample", "aggregate"]
GRANULARITIES: tuple[Granularity, ...] = ("", "aggregate", "per sample")
"""Ordered by how much they reveal. For several parts, the most revealing one counts."""


@dataclass(frozen=True)
class Facts:
    """Requirements and properties of a method. Lists, tables and warnings are generated from them.

    Attributes:
        batch_norm: Works only on models with batch norm, which it may remove. The default model is chosen accordingly.
        class_labels: Needs one class label per example, so it works only with tasks that have them.
        client_state: Clients keep state between rounds (cross-silo).
        full_participation: Every client must take part in every round.
        smallest_batch: Smallest batch size. None: the minimum of the model (2 with batch norm, otherwise 1).
        data_derived_uploads: Uploads that are derived from data but are not model entries. Empty: none.
        granularity: Whether these uploads describe single samples ("per sample") or many ("aggregate"). Empty: no such uploads.
        messages: Messages per client and round, as text.
        extra_work: Extra computation, as text. Empty: negligible.
        protects: Unit of its differential privacy guarantee: samples or clients. Empty: no guarantee.
        noise_at: Where the noise is added.
        noise_from: Source of the noise: the run's seed (anyone who knows the seed can remove the noise) or the system's generator.
        epsilon: Privacy budget of the guarantee.
        delta: Probability that the guarantee fails.
        withholds_loss: Clients do not report their training loss, even if it is NaN or infinite, because updates are bounded.
        passes: Forward passes of the model per training step, in training mode. It bounds the batch counters that clients may send.
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
    passes: int = 1

    @property
    def uploads_with_granularity(self) -> str:
        """Uploads other than model entries, with their granularity. Empty: none."""
        uploads = self.data_derived_uploads
        return f"{uploads} ({self.granularity})" if self.granularity else uploads

    @classmethod
    def of_all(cls, facts: Sequence[Facts]) -> Facts:
        """Combine the facts of several parts: join texts, take the largest number, otherwise the first value that is not the default."""
        joined: dict[str, Any] = {}
        for item in fields(cls):
            values = [value for fact in facts if (value := getattr(fact, item.name)) != item.default]
            if item.name in ("data_derived_uploads", "extra_work"):
                joined[item.name] = "; ".join(dict.fromkeys(values))
            elif item.name == "granularity":
                joined[item.name] = max(values, key=GRANULARITIES.index, default="")
            elif values:
                joined[item.name] = values[0] if isinstance(values[0], str) else max(values)
        return cls(**joined)


@dataclass(frozen=True)
class Method:
    """A federated method: named slots, see ``core/slots.py``. Most methods fill one or two.

    ``standalone`` marks a complete method, as opposed to a part that modifies one.
    ``is_base`` marks the method that all others modify. It is written only if no other part is standalone.
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
        """Parts that it was joined from, or the method itself."""
        return self.joined_from or (self,)

    def __str__(self) -> str:
        return " + ".join(write_call(part.name, _written_options(part)) for part in self.parts)

    @property
    def full_text(self) -> str:
        """Expression with every option, including defaults."""
        return " + ".join(write_call(part.name, dict(part.options)) for part in self.parts)

    def fills(self, slot: str) -> bool:
        """Return True if the slot is filled."""
        return bool(getattr(self, slot))

    def items(self, slot: str) -> tuple[Any, ...]:
        """Return the items of a slot, whether it contains one value, a tuple or a mapping."""
        filled = getattr(self, slot)
        if isinstance(filled, Mapping):
            return tuple(filled.values())
        return filled if isinstance(filled, tuple) else () if filled is None else (filled,)

    @property
    def filled_slots(self) -> list[str]:
        """Names of the filled slots, in the order of the table."""
        return [slot for slot in SLOTS if self.fills(slot)]


def _written_options(part: Method) -> dict[str, Option]:
    if part.name not in methods.known():
        return dict(part.options)
    parameters = methods.find(part.name).signature.parameters
    return {key: value for key, value in part.options if key in part.always_written or value != parameters[key].default}


class _Methods(Registry[Method]):
    """Methods from entry points of installed packages, including polyfed, and from loaded files."""

    def known(self) -> Mapping[str, Recorded[Method]]:
        """Return the methods registered so far, without discovering more."""
        return self._records

    def base(self) -> Method:
        """Return the method that all others modify, with default options."""
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
    """Register a method factory, so that the method is listed, can be written as an expression, and is contract-tested.

    Args:
        factory: Function with literal options that returns a ``Method`` of the same name.
        shows: Options that the expression always contains, even at their default.
        base: True for the one method that all others modify.
        shared_options: Descriptions of options that several factories have. They are appended to the docstring's Args section.
        absent: Values of options in run folders that predate these options, if they differ from the defaults.
    """

    def record(factory: Factory[P]) -> Factory[P]:
        if shared_options:
            factory.__doc__ = _with_options(factory, shared_options)

        @functools.wraps(factory)
        def build(*args: P.args, **kwargs: P.kwargs) -> Method:
            options = entry.bind(Call(entry.name, args, kwargs))  # type: ignore[arg-type]
            made = factory(**options)  # type: ignore[arg-type, call-arg]
            if made.name != entry.name:
                raise OptionError(f"The factory {entry.name} returned a method called {made.name}. The two names must be equal.")
            return replace(made, options=tuple(options.items()), always_written=shows, is_base=base)

        entry = methods.add(factory, build_with=build, is_base=base, absent=absent or {})
        return build

    return record(factory) if factory is not None else record


def _with_options(factory: Factory[P], texts: Mapping[str, str]) -> str:
    unknown = sorted(set(texts) - set(inspect.signature(factory).parameters))
    if unknown:
        raise OptionError(f"shared_options describes {unknown[0]!r}, which is not an option of {factory.__name__}.")
    doc, section, reference = (inspect.getdoc(factory) or "").partition("\n\nReference:\n")
    heading = [] if "\nArgs:\n" in doc else ["", "Args:"]
    return "\n".join([doc, *heading, *(f"    {name}: {text}" for name, text in texts.items())]) + section + reference


def parse(text: str) -> Method:
    """Parse a method expression, such as ``"fedavg + fedprox(mu=0.1)"``.

    Names are joined with ``+``; options are literals in parentheses. The result is in canonical order.
    """
    parts: list[Method] = []
    for call in read_sum(text):
        record = methods.find(call.spelled)
        record.bind(call)
        parts += record.extra["build_with"](*call.positional, **call.named).parts
    return join(parts)


def read_recorded(text: str) -> str:
    """Add options that are newer than the run folder to its method expression, with the values that the run used."""
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
    """Join parts into one method. Raise ``JoinError`` if two parts cannot be joined."""
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
        raise JoinError(f"{twice[0]} is given twice. Use each part once.")
    others = [part for part in parts if not part.is_base]
    base = next((part for part in parts if part.is_base), None)
    if any(part.standalone for part in others) and (base is None or not base.filled_slots):
        base = None
    elif base is None:
        base = methods.base()
    # Standalone methods come before the parts that modify them.
    rest = sorted(others, key=lambda p: (not (p.standalone and (p.sharing or p.round or p.population or p.surgery)), p.name))
    return ([base] if base is not None else []) + rest


def as_method(value: str | Method) -> Method:
    """Return the method of an expression, or a ``Method`` checked in the same way."""
    return parse(value) if isinstance(value, str) else join(value.parts)


def load_file(path: str | Path, trust: Trust) -> list[str]:
    """Run a method or model file, if it is trusted, and return the names of the methods that it registers.

    A file without methods must define a function or class, such as the one in ``model = "file:function"``.
    """
    trust.require(code_in(load=[str(path)]))
    file = Path(path)
    if not os.path.isfile(file):
        raise OptionError(f"Method file not found: {path}.")
    before = set(methods.names())
    name = f"polyfed_loaded_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file. Pass a file such as my_method.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(f"{path} failed to run: {type(error).__name__}: {error}.") from error
    new = sorted(
        (set(methods.names()) - before) | {known for known, record in methods.known().items() if record.build.__module__ == name}
    )
    defined = [value for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not new and not any(getattr(value, "__module__", None) == name for value in defined):
        raise OptionError(
            f"{path} registers no method and defines no model. Decorate a function that returns a Method with @polyfed.register, "
            f"or write a function that returns a torch module and pass --model {file.stem}:FUNCTION."
        )
    return new
