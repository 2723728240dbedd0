"""``node.toml``: what a node allows. It lies at the node, the node reads it for every ask, and the server cannot change it.

What an ask may not do is refused by name: the node writes it to its audit log, and the server's log says which node refused what.
"""

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
    domain: str = limit("", "which domain of the data this node holds; empty: the only one there is")
    client: str = limit("", "name of this client in tables; empty: its domain")
    methods: tuple[str, ...] = limit((ALL,), 'parts of methods that may be run here; "*": all of polyfed\'s')
    data_derived_uploads: str = limit(
        AGGREGATE, "beyond model entries, what may leave that is derived from data: nothing, aggregate, per sample"
    )
    models: tuple[str, ...] = limit((ALL,), 'models that may be trained here; "*": all of polyfed\'s')
    import_paths: tuple[str, ...] = limit(
        (), "models that are imported by module.path:function; none is allowed that is not named here"
    )
    initial_weights: tuple[str, ...] = limit((), "files of initial weights on this machine that a run may name")
    code: tuple[str, ...] = limit((), "SHA-256 of app bundles, or of files in them, whose code may be run here")
    newcomer: bool = limit(False, "whether layers that stay here may be asked for once, for a newcomer's model")
    scores: tuple[str, ...] = limit((TEST, VALIDATION), "data whose scores may be told: test, validation")
    class_counts: bool = limit(True, "whether the number of examples of each class may be told; false: only how many there are")
    max_rounds: int = limit(1000, "rounds that a run may have at most")
    min_clients: int = limit(2, "clients that a run must have at least, this one included")
    min_samples: int = limit(
        8,
        "examples that must go into what leaves after training: steps times batch size, and those that the run's partition leaves this node",
    )
    dp_required: bool = limit(
        False,
        "whether only methods with differential privacy are allowed: noise of this machine's own on all that they upload; "
        "class counts, training loss and validation scores stay here",
    )
    max_epsilon: float = limit(10.0, "largest epsilon that counts as such a promise")
    max_delta: float = limit(1e-5, "largest delta that counts as such a promise: the probability with which it may fail")
    max_total_epsilon: float = limit(
        10.0,
        "largest epsilon, at max_delta, that this node spends over all runs where dp_required is true; its own account counts",
    )
    keep_days: int = limit(30, "days after which what a run left here is removed, from when it was last asked for")

    def __post_init__(self) -> None:
        if self.data_derived_uploads not in LEVELS:
            raise SettingError(
                f"{FILE}: data_derived_uploads cannot be {self.data_derived_uploads!r}. {nearest(self.data_derived_uploads, LEVELS)}"
            )
        for name in self.scores:
            if name not in (TEST, VALIDATION):
                raise SettingError(f"{FILE}: scores cannot name {name!r}. {nearest(name, (TEST, VALIDATION))}")
        for name in ("max_rounds", "min_clients", "min_samples", "keep_days"):
            if getattr(self, name) < 1:
                raise SettingError(f"{FILE}: {name} must be at least 1, found {getattr(self, name)}.")
        for name in ("max_epsilon", "max_total_epsilon"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{FILE}: {name} must be positive, found {getattr(self, name)}.")
        if not 0 < self.max_delta < 1:
            raise SettingError(f"{FILE}: max_delta must lie between 0 and 1, found {self.max_delta}.")

    @property
    def tells_class_counts(self) -> bool:
        """Whether the number of examples of each class leaves this node; no noise covers it."""
        return self.class_counts and not self.dp_required

    # -------------------------------------------------------------------------------------------------------------- asking
    def problems(
        self, settings: Settings, run_config: Mapping[str, Any], ask: Mapping[str, Any], extras: Mapping[str, Any] | None = None
    ) -> list[str]:
        """What an ask may not do here, each in a sentence without paths.

        ``ask`` is the question, and what the server says of its purpose and round; ``extras`` is sent along with it.
        """
        return [
            *self._about_code(settings),
            *self._about_run(settings, run_config),
            *self._about_ask(ask),
            *self._about_method(settings),
            *self._about_question(settings, str(ask.get("what")), extras or {}),
        ]

    def _about_code(self, settings: Settings) -> Iterator[str]:
        model = settings.model
        if model is not None and names_function(model):
            if model not in self.import_paths:
                yield f"the model {model} would be imported, and import_paths does not name it"
        elif model is not None and not _allowed(_name_in(model), self.models):
            yield f"the model {_name_in(model)} is not among the models that are allowed"
        files = [settings.init, None if model is None else weights_file(model)]
        if any(file is not None and file not in self.initial_weights for file in files):
            yield "the run starts from a file of weights, and initial_weights does not name it"

    def _about_run(self, settings: Settings, run_config: Mapping[str, Any]) -> Iterator[str]:
        if settings.rounds > self.max_rounds:
            yield f"the run has {settings.rounds} rounds, max_rounds is {self.max_rounds}"
        clients = run_config.get(MIN_NODES, self.min_clients)
        if not isinstance(clients, int) or clients < self.min_clients:
            yield f"the run needs {clients} clients only, min_clients is {self.min_clients}"
        if settings.local_steps is not None and settings.local_steps * settings.batch_size < self.min_samples:
            samples = settings.local_steps * settings.batch_size
            yield f"clients train on {samples} examples in a round, min_samples is {self.min_samples}"
        if not self.tells_class_counts and needs_class_counts(settings.loss):
            why = "dp_required is true" if self.class_counts else "class_counts is false"
            yield f"the loss {_name_in(settings.loss)} may need the numbers of examples by class, and {why}"

    def _about_ask(self, ask: Mapping[str, Any]) -> Iterator[str]:
        if ask.get("purpose") == NEWCOMER and not self.newcomer:
            yield "a newcomer's model is asked for, and newcomer is false"
        facts = ask.get("facts")
        rounds = [ask.get("round", 0), facts.get("rounds", 0) if isinstance(facts, Mapping) else 0]
        if any(not isinstance(number, int) or number > self.max_rounds for number in rounds):
            yield f"it is about round {rounds[0]} of {rounds[1]}, max_rounds is {self.max_rounds}"

    def _about_question(self, settings: Settings, question: str, extras: Mapping[str, Any]) -> Iterator[str]:
        """Every question is judged by what its answer lets out; the server writes the purpose, so that says nothing."""
        if question == DESCRIBE:
            return
        method = as_method(settings.method)
        row = answered(method, question, extras)
        if row is None:
            yield f"{settings.method} declares no answer to the question {question[:LONGEST_NAME]!r} of this form"
            return
        if row.what == KEPT_LAYERS and not self.newcomer:
            yield f"{row.what} are asked for, and newcomer is false"
        if (row.what == TEST_SCORES and TEST not in self.scores) or (
            row.what == VALIDATION_SCORES and VALIDATION not in self.scores
        ):
            yield f"{row.what} are asked for, and scores does not name them"
        if row.what == VALIDATION_SCORES and row not in departures(method, settings):
            yield f"{row.what} are asked for, and the run does not choose its round by them (selection is {settings.selection})"
        # What a training lets out is judged with the method.
        if self.dp_required and question != "train" and row != TEST_DATA_ONLY and not row.covered:
            yield f"{row.what} are asked for, which no noise covers ({row.why}), and dp_required is true"

    def _about_method(self, settings: Settings) -> Iterator[str]:
        parts = [call.name for call in read_sum(settings.method)]
        for part in parts:
            if not _allowed(part, self.methods):
                yield f"the method {part} is not among the methods that are allowed"
        method = as_method(settings.method)
        granularity = method.facts.granularity or NOTHING
        if LEVELS.index(granularity) > LEVELS.index(self.data_derived_uploads):
            uploads = method.facts.data_derived_uploads
            yield f"{settings.method} uploads {uploads} ({granularity}), data_derived_uploads is {self.data_derived_uploads}"
        if VALIDATION not in self.scores and any(row.what == VALIDATION_SCORES for row in departures(method, settings)):
            yield f"the run sends {VALIDATION_SCORES} (selection is {settings.selection}), and scores does not name them"
        if self.dp_required:
            yield from self._about_privacy(method, settings)

    def _about_privacy(self, method: Method, settings: Settings) -> Iterator[str]:
        facts = method.facts
        if not facts.protects:
            yield f"{settings.method} adds no noise to what leaves, and dp_required is true"
            return
        if facts.noise_at != "client":
            yield f"{settings.method} adds its noise at the server, which sees what leaves without it, and dp_required is true"
        if facts.noise_from != "system":
            yield f'{settings.method} takes its noise from the seed, which the server knows, and dp_required is true; noise="system" is needed'
        if facts.epsilon > self.max_epsilon:
            yield f"{settings.method} promises epsilon = {facts.epsilon:g}, max_epsilon is {self.max_epsilon:g}"
        if facts.delta > self.max_delta:
            yield f"{settings.method} promises delta = {facts.delta:g}, max_delta is {self.max_delta:g}"
        for row in uncovered(method, settings):
            yield f"{row.part} sends {row.what}, which no noise covers ({row.why}), and dp_required is true"
        for row in departures(method, settings):
            if row.what in (TRAINING_LOSS, VALIDATION_SCORES):
                yield f"the run sends {row.what}, which no noise covers ({row.why}), and dp_required is true"

    # --------------------------------------------------------------------------------------------------------------- files
    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a file; a key that is not known is refused, since it would be ignored."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"{path} cannot be read ({error}).") from error
        fields = {item.name: item for item in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in fields:
                raise SettingError(f"{path}: there is no key {name!r}. {nearest(name, fields)}")
            _require_type(path, name, value, fields[name].default)
        found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**found)

    def write(self, path: Path) -> None:
        """Write the file with what every key means."""
        lines = ["# What this node allows. The server cannot change it. polyfed join reads it again for every ask."]
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
        kinds = {tuple: "a list of texts", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise SettingError(f"{path}: {name} takes {kinds[type(default)]}, found {value!r}.")


def _allowed(name: str, names: Sequence[str]) -> bool:
    return ALL in names or name in names


def _name_in(text: str) -> str:
    """The name in a text with options."""
    return text.split("(")[0].strip()


def refused(problems: Sequence[str], client: str) -> str:
    """The sentence that both ends read."""
    return f"Refused by {client or 'this node'} (its {FILE}): {'; '.join(problems)}."


class Refused(PolyfedError, PermissionError):
    """Something that this node does not allow."""
