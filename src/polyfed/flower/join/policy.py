"""The node policy (``node.toml``), which the node reads for every request and the server cannot change."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.core.method import Method, as_method
from polyfed.core.privacy import (
    KEPT_LAYERS,
    TEST_DATA_ONLY,
    TEST_SCORES,
    TRAINING_LOSS,
    VALIDATION_SCORES,
    answered,
    departures,
    uncovered,
)
from polyfed.core.rounds import NEWCOMER
from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.flower.app import MIN_NODES
from polyfed.flower.deploy.folders import POLICY as FILE
from polyfed.flower.deploy.private_files import write_private
from polyfed.flower.wire.message import DESCRIBE
from polyfed.models.model_text import weights_file
from polyfed.settings import Settings
from polyfed.tasks.losses import needs_class_counts
from polyfed.text import read_sum
from polyfed.trust import names_function

ALL = "*"
NOTHING, AGGREGATE, PER_SAMPLE = "nothing", "aggregate", "per sample"
LONGEST_NAME = 60
LEVELS = (NOTHING, AGGREGATE, PER_SAMPLE)
TEST, VALIDATION = "test", "validation"


def limit(default: Any, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Policy:
    """The keys of ``node.toml``."""

    data: str = limit("", "folder root/<domain>/<class>/*, or a data set; it stays here")
    domain: str = limit("", "this node's domain in the data; empty: the only one")
    client: str = limit("", "name of this client in tables, reserved when the node enrols; empty: its domain")
    methods: tuple[str, ...] = limit((ALL,), 'method parts that may run here; "*": all built-in ones')
    data_derived_uploads: str = limit(
        AGGREGATE, "data-derived uploads, besides model entries, that may leave: nothing, aggregate, per sample"
    )
    models: tuple[str, ...] = limit((ALL,), 'models that may be trained here; "*": all built-in ones')
    import_paths: tuple[str, ...] = limit((), "models that may be imported by module.path:function")
    initial_weights: tuple[str, ...] = limit((), "files with initial weights on this machine that a run may use")
    code: tuple[str, ...] = limit((), "SHA-256 of app bundles, or of files in them, whose code may run here")
    newcomer: bool = limit(False, "whether the server may request local layers once, for a newcomer model")
    scores: tuple[str, ...] = limit((TEST, VALIDATION), "splits whose scores may leave: test, validation")
    class_counts: bool = limit(True, "whether the number of examples per class may leave; false: only the total")
    max_rounds: int = limit(1000, "maximum number of rounds of a run")
    min_clients: int = limit(2, "minimum number of clients of a run, including this one")
    min_samples: int = limit(
        8,
        "minimum number of training examples behind an upload, counted as steps times batch size and as this node's examples in the run's partition",
    )
    dp_required: bool = limit(
        False,
        "allow only methods with differential privacy: noise from this machine on all uploads; "
        "class counts, training loss and validation scores stay here",
    )
    max_epsilon: float = limit(10.0, "largest epsilon that dp_required accepts")
    max_delta: float = limit(1e-5, "largest delta that dp_required accepts: the probability with which the guarantee may fail")
    max_total_epsilon: float = limit(
        10.0,
        "largest epsilon, at max_delta, that this node spends over all runs if dp_required is true, by its own privacy ledger",
    )
    keep_days: int = limit(30, "days that a run's local state is kept after the last request for it")

    def __post_init__(self) -> None:
        if self.data_derived_uploads not in LEVELS:
            value = self.data_derived_uploads
            raise SettingError(f"{FILE}: data_derived_uploads cannot be {value!r}. {nearest(value, LEVELS)}")
        for name in self.scores:
            if name not in (TEST, VALIDATION):
                raise SettingError(f"{FILE}: scores cannot contain {name!r}. {nearest(name, (TEST, VALIDATION))}")
        for name in ("max_rounds", "min_clients", "min_samples", "keep_days"):
            if getattr(self, name) < 1:
                raise SettingError(f"{FILE}: {name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_epsilon", "max_total_epsilon"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{FILE}: {name} must be positive, got {getattr(self, name)}.")
        if not 0 < self.max_delta < 1:
            raise SettingError(f"{FILE}: max_delta must be between 0 and 1, got {self.max_delta}.")

    @property
    def sends_class_counts(self) -> bool:
        """Return True if class counts, which no noise covers, may leave this node."""
        return self.class_counts and not self.dp_required

    def problems(
        self, settings: Settings, run_config: Mapping[str, Any], request: Mapping[str, Any], extras: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return the reasons to reject a request, from its control values and extras."""
        return [
            *self._code_problems(settings),
            *self._run_problems(settings, run_config),
            *self._round_problems(request),
            *self._method_problems(settings),
            *self._reply_problems(settings, str(request.get("what")), extras or {}),
        ]

    def _code_problems(self, settings: Settings) -> Iterator[str]:
        model = settings.model
        if model is not None and names_function(model):
            if model not in self.import_paths:
                yield f"the model {model} would be imported, but import_paths does not list it"
        elif model is not None and not _allowed(_name_in(model), self.models):
            yield f"models does not list the model {_name_in(model)}"
        files = [settings.init, None if model is None else weights_file(model)]
        if any(file is not None and file not in self.initial_weights for file in files):
            yield "the run starts from a weights file, but initial_weights does not list it"

    def _run_problems(self, settings: Settings, run_config: Mapping[str, Any]) -> Iterator[str]:
        if settings.rounds > self.max_rounds:
            yield f"the run has {settings.rounds} rounds, but max_rounds is {self.max_rounds}"
        clients = run_config.get(MIN_NODES, self.min_clients)
        if not isinstance(clients, int) or clients < self.min_clients:
            yield f"the run requires only {clients} clients, but min_clients is {self.min_clients}"
        if settings.local_steps is not None and settings.local_steps * settings.batch_size < self.min_samples:
            samples = settings.local_steps * settings.batch_size
            yield f"clients train on {samples} examples per round, but min_samples is {self.min_samples}"
        if not self.sends_class_counts and needs_class_counts(settings.loss):
            reason = "dp_required is true" if self.class_counts else "class_counts is false"
            yield f"the loss {_name_in(settings.loss)} may need class counts, but {reason}"

    def _round_problems(self, request: Mapping[str, Any]) -> Iterator[str]:
        if request.get("purpose") == NEWCOMER and not self.newcomer:
            yield "the server requests a newcomer model, but newcomer is false"
        facts = request.get("facts")
        rounds = [request.get("round", 0), facts.get("rounds", 0) if isinstance(facts, Mapping) else 0]
        if any(not isinstance(number, int) or number > self.max_rounds for number in rounds):
            yield f"the request is for round {rounds[0]} of {rounds[1]}, but max_rounds is {self.max_rounds}"

    def _reply_problems(self, settings: Settings, question: str, extras: Mapping[str, Any]) -> Iterator[str]:
        """Yield problems with the content of the reply. The purpose is not considered, because the server chooses it."""
        if question == DESCRIBE:
            return
        method = as_method(settings.method)
        row = answered(method, question, extras)
        if row is None:
            yield f"{settings.method} declares no reply to the request {question[:LONGEST_NAME]!r} in this form"
            return
        if row.what == KEPT_LAYERS and not self.newcomer:
            yield f"the server requests {row.what}, but newcomer is false"
        if (row.what == TEST_SCORES and TEST not in self.scores) or (
            row.what == VALIDATION_SCORES and VALIDATION not in self.scores
        ):
            yield f"the server requests {row.what}, but scores does not list them"
        if row.what == VALIDATION_SCORES and row not in departures(method, settings):
            yield f"the server requests {row.what}, but the run does not select its round by them (selection is {settings.selection})"
        # Uploads of training are checked with the method.
        if self.dp_required and question != "train" and row != TEST_DATA_ONLY and not row.covered:
            yield f"the server requests {row.what}, which no noise covers ({row.why}), but dp_required is true"

    def _method_problems(self, settings: Settings) -> Iterator[str]:
        for part in read_sum(settings.method):
            if not _allowed(part.name, self.methods):
                yield f"methods does not list the method {part.name}"
        method = as_method(settings.method)
        granularity = method.facts.granularity or NOTHING
        if LEVELS.index(granularity) > LEVELS.index(self.data_derived_uploads):
            uploads = method.facts.data_derived_uploads
            yield f"{settings.method} uploads {uploads} ({granularity}), but data_derived_uploads is {self.data_derived_uploads}"
        if VALIDATION not in self.scores and any(row.what == VALIDATION_SCORES for row in departures(method, settings)):
            yield f"the run sends {VALIDATION_SCORES} (selection is {settings.selection}), but scores does not list them"
        if self.dp_required:
            yield from self._privacy_problems(method, settings)

    def _privacy_problems(self, method: Method, settings: Settings) -> Iterator[str]:
        facts = method.facts
        if not facts.protects:
            yield f"{settings.method} adds no noise to uploads, but dp_required is true"
            return
        if facts.noise_at != "client":
            yield f"{settings.method} adds noise only at the server, which sees the uploads without it, but dp_required is true"
        if facts.noise_from != "system":
            yield f'{settings.method} draws noise from the seed, which the server knows, but dp_required is true; use noise="system"'
        if facts.epsilon > self.max_epsilon:
            yield f"{settings.method} guarantees epsilon = {facts.epsilon:g}, but max_epsilon is {self.max_epsilon:g}"
        if facts.delta > self.max_delta:
            yield f"{settings.method} guarantees delta = {facts.delta:g}, but max_delta is {self.max_delta:g}"
        for row in uncovered(method, settings):
            yield f"{row.part} sends {row.what}, which no noise covers ({row.why}), but dp_required is true"
        for row in departures(method, settings):
            if row.what in (TRAINING_LOSS, VALIDATION_SCORES):
                yield f"the run sends {row.what}, which no noise covers ({row.why}), but dp_required is true"

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file; an unknown key is an error, because it would have no effect."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"Cannot read {path} ({error}).") from error
        fields = {item.name: item for item in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in fields:
                raise SettingError(f"{path}: unknown key {name!r}. {nearest(name, fields)}")
            _require_type(path, name, value, fields[name].default)
        found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**found)

    def write(self, path: Path) -> None:
        """Write the policy file with a comment for every key."""
        lines = ["# What this node allows. The server cannot change this file, and the node reads it for every request."]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            text = tomli_w.dumps({item.name: list(value) if isinstance(value, tuple) else value}).strip()
            lines += ["", f"# {item.metadata['doc']}", " ".join(text.split()) if isinstance(value, tuple) else text]
        write_private(path, "\n".join(lines) + "\n")


def _require_type(path: Path, name: str, value: object, default: object) -> None:
    if isinstance(default, tuple):
        fits = isinstance(value, list) and all(isinstance(each, str) for each in value)
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is type(default)
    if not fits:
        kinds = {tuple: "a list of strings", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise SettingError(f"{path}: {name} must be {kinds[type(default)]}, got {value!r}.")


def _allowed(name: str, names: Sequence[str]) -> bool:
    return ALL in names or name in names


def _name_in(text: str) -> str:
    """Return the name of an expression, without options."""
    return text.split("(")[0].strip()


class Refused(PolyfedError, PermissionError):
    """The node or the server rejects a request."""
