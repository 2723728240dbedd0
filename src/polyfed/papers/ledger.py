"""The ledger: one small JSON file for each finished run, from which results pages are generated without any run folder.

A record has the run's settings and method, the command that repeats it, commit, versions, digest, cost, scores by domain, curves and
which test images were right. ``papers/recording.py`` makes records of finished runs.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.evaluation import Row
from polyfed.errors import RunFolderError, nearest
from polyfed.papers.grid import NOT_IN_NAME, canonical
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.paths import data_slug, slug
from polyfed.settings import FACTS, Settings

FORMAT = 1
FINISHED, DIVERGED = STATES = ("finished", "diverged")
_ALWAYS = ("data", "model", "rounds", "lr", "optimizer", "batch_size", "local_epochs", "selection")
"""Settings that every record has, so that a new default does not change what it means."""
VARIANT = ("amp", "layout", "backend")
"""Settings that change rounding, not the experiment: a cell shows such runs with a mark."""
LAST, MEAN_LAST = "last", "mean_last"
LAST_ONLY = "last round only"
_MACHINE_PATH = re.compile(r"(?<![\w.:/])(?:~|/(?:home|work|tmp|root|Users|mnt|media|data|opt|var|srv))/")
DEFAULTS: Mapping[str, Any] = {name: facts.default for name, facts in FACTS.items()}


@dataclass(frozen=True)
class Record:
    """One run of the ledger.

    Attributes:
        identity: the name of its settings, without the seed.
        seed: the seed.
        state: finished or diverged.
        settings: settings that are not defaults, and those of ``_ALWAYS``; no folder of the machine.
        method: the method with every option.
        command: the command that repeats the run; the folder of the data is DATA.
        commit: the commit that trained it.
        versions: versions of Python and packages.
        machine: the kind of machine.
        digest: the digest of the final state.
        cost: cpu_seconds, seconds, bytes_up, bytes_down.
        rounds: rounds that were trained; of a diverged run, the round that failed.
        selected_round: the round whose model counts.
        last_rounds: rounds whose test scores are averaged; empty if one round counts.
        scores: test scores by view and domain: fractions, with ``count``.
        by_round: test scores of every scored round: ``rounds``, and ``scores`` with a list for each measure.
        validation: the mean validation score of clients by round: ``rounds``, and a list for each measure. No test score.
        right: packed bits of the test images that were classified correctly, by view, client and domain.
        data: the packed files that the data came from.
        analyses: what was measured in the models, by the kind of analysis.
        error: why a run diverged.
        notes: remarks that pages show.
    """

    identity: str
    seed: int
    state: str
    settings: Mapping[str, Any]
    method: str
    command: str
    commit: str
    versions: Mapping[str, str]
    machine: str
    digest: str
    cost: Mapping[str, float]
    rounds: int
    selected_round: int | None = None
    last_rounds: Sequence[int] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    by_round: Mapping[str, Any] = field(default_factory=dict)
    validation: Mapping[str, Any] = field(default_factory=dict)
    right: Sequence[Mapping[str, Any]] = ()
    data: str = ""
    analyses: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    notes: Sequence[str] = ()

    @property
    def file(self) -> str:
        return f"{self.identity}-seed{self.seed}.json"

    @functools.cached_property
    def full_settings(self) -> Settings:
        """The settings with defaults filled in and every option of the method."""
        return Settings.from_dict({**self.settings, "method": self.method, "seed": self.seed}, self.file)

    @property
    def selection(self) -> str:
        return str(self.settings["selection"])

    def rows(self) -> list[Row]:
        """The test scores as rows of an evaluation, one for each view and domain."""
        return [_row(one) for one in self.scores]

    def rows_by_round(self) -> dict[int, list[Row]]:
        rounds = self.by_round.get("rounds", ())
        many = self.by_round.get("scores", ())
        return {number: [_row(one, place) for one in many] for place, number in enumerate(rounds)}

    def is_right(self) -> dict[tuple[str, str, str], np.ndarray]:
        """Whether each test image was classified correctly, by view, client and domain."""
        return {(one["view"], one["client"], one["domain"]): _unpacked_bits(one["bits"], one["count"]) for one in self.right}

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain values, without empty ones."""
        plain = {"format": FORMAT, **{item.name: getattr(self, item.name) for item in dataclasses.fields(self)}}
        return {name: value for name, value in plain.items() if not (name in OPTIONAL and value in (None, "", (), [], {}))}


OPTIONAL = tuple(
    item.name
    for item in dataclasses.fields(Record)
    if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
)
NAMES = tuple(item.name for item in dataclasses.fields(Record))
KINDS: Mapping[str, tuple[type, ...]] = {
    "seed": (int,),
    "rounds": (int,),
    "selected_round": (int, type(None)),
    **dict.fromkeys(("settings", "versions", "cost", "by_round", "validation", "analyses"), (dict,)),
    **dict.fromkeys(("last_rounds", "scores", "right", "notes"), (list,)),
}
"""The JSON types of entries; all others are text."""


def _row(one: Mapping[str, Any], place: int | None = None) -> Row:
    numbers = {
        name: value[place] if place is not None and isinstance(value, list) else value
        for name, value in one.items()
        if name not in ("view", "domain")
    }
    return Row(one["view"], "", one["domain"], numbers)


def recorded_settings(settings: Settings) -> dict[str, Any]:
    """The settings that a record keeps: those that are not defaults, and those of ``_ALWAYS``; lists for tuples."""
    written = settings.to_dict()
    return {
        name: written.get(name)
        for name in FACTS
        if name not in NOT_IN_NAME and name != "method" and (name in _ALWAYS or getattr(settings, name) != DEFAULTS[name])
    }


@functools.cache
def identity_of(settings: Settings) -> str:
    """The name of runs with these settings, whatever their seed and machine.

    It does not change when a setting or an option of a method is added, since defaults do not count. Further test scores
    (``evaluate_last``) do not count either: they change neither the training nor the chosen round.
    """
    method, counted = canonical(settings.method), recorded_settings(settings)
    counted.pop("evaluate_last", None)
    written = json.dumps(counted | {"method": method}, sort_keys=True).encode()
    return f"{data_slug(settings.data)}-{slug(method)[:30]}-{hashlib.sha256(written).hexdigest()[:10]}"


@functools.cache
def loose_identity(settings: Settings) -> str:
    """The identity without what changes only rounding or evaluation: runs with the same one can stand for each other, with a mark."""
    changes: dict[str, Any] = {name: DEFAULTS[name] for name in VARIANT}
    if settings.selection.split("(")[0] in (LAST, MEAN_LAST):
        changes |= {"evaluate_every": DEFAULTS["evaluate_every"], "selection": LAST}
    return identity_of(dataclasses.replace(settings, **changes))


def marks_of(record: Record, wanted: Settings) -> tuple[str, ...]:
    """In what a record differs from the settings of a cell, and its notes."""
    found = [str(value) for name in VARIANT if (value := getattr(record.full_settings, name)) != getattr(wanted, name)]
    if record.selection == LAST and wanted.selection.startswith(MEAN_LAST):
        found.append(LAST_ONLY)
    if record.selection.startswith(MEAN_LAST) and wanted.selection == LAST:
        found.append(f"mean of the last {len(record.last_rounds)} rounds")
    return tuple(dict.fromkeys([*found, *record.notes]))


def packed_bits(right: np.ndarray) -> str:
    """Booleans as text: eight to a byte, base64.

    >>> packed_bits(np.array([True, False, True])), _unpacked_bits("oA==", 3).tolist()
    ('oA==', [True, False, True])
    """
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode()


def _unpacked_bits(text: str, count: int) -> np.ndarray:
    bits: np.ndarray = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8), count=count).astype(bool)
    return bits


def read_record(path: Path) -> Record:
    """Read one file of a ledger; anything unexpected in it is an error that names the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path.name} is no record of a run: {error}. Restore the file from a backup.") from error
    record = record_from(document, path.name)
    if record.file != path.name:
        raise RunFolderError(f"{path.name} holds the record of {record.file}. Rename the file.")
    return record


def record_from(document: Any, where: str) -> Record:
    """A record from plain values, checked."""

    def refuse(why: str) -> RunFolderError:
        return RunFolderError(f"{where} is no record of a run: {why}. Restore the file from a backup.")

    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise refuse(f"its format is not {FORMAT}")
    values = {name: value for name, value in document.items() if name != "format"}
    for name in values:
        if name not in NAMES:
            raise refuse(f"there is no entry {name!r}. {nearest(name, NAMES)}".rstrip("."))
    for name in NAMES:
        if name not in values and name not in OPTIONAL:
            raise refuse(f"{name} is missing")
        kinds = KINDS.get(name, (str,))
        if name in values and (not isinstance(values[name], kinds) or isinstance(values[name], bool)):
            raise refuse(f"{name} is {values[name]!r:.60}")
    if values["state"] not in STATES:
        raise refuse(f"its state is {values['state']!r}")
    if "selection" not in values["settings"]:
        raise refuse("its settings have no selection")
    require_portable(document, where)
    for one in values.get("right", ()):
        if not {"view", "client", "domain", "count", "bits"} <= set(one):
            raise refuse("an entry of right is incomplete")
    record = Record(**values)
    _require_curves(record, refuse)
    Settings.from_dict({**record.settings, "method": record.method, "seed": record.seed}, where)
    return record


def _require_curves(record: Record, refuse: Any) -> None:
    """Lists of a curve are as long as its rounds; a validation curve has no score by domain or view."""
    length = len(record.validation.get("rounds", ()))
    for name, values in record.validation.items():
        if not isinstance(values, list) or len(values) != length or any(isinstance(value, dict | list) for value in values):
            raise refuse(f"validation {name} is no list of {length} numbers")
    length = len(record.by_round.get("rounds", ()))
    for one in record.by_round.get("scores", ()):
        if any(isinstance(value, list) and len(value) != length for value in one.values()):
            raise refuse(f"a test curve does not have {length} rounds")


def require_portable(document: Any, where: str) -> None:
    """Refuse a record that names a folder of a machine."""
    if found := _MACHINE_PATH.search(json.dumps(document)):
        text = json.dumps(document)[found.start() : found.start() + 60]
        raise RunFolderError(
            f"{where} names a folder of this machine ({text}...). Records must not: write DATA or a relative path."
        )


def write_record(folder: Path, record: Record) -> Path:
    """Write a record. A record of the same run must have the same digest; what either of them measured is kept then.

    Args:
        folder: the ledger.
        record: what is written.
    """
    path = folder / record.file
    if path.exists():
        before = read_record(path)
        if before.digest != record.digest or before.state != record.state:
            raise RunFolderError(
                f"{path.name} is in the ledger with digest {before.digest[:16] or before.state}, and this run has "
                f"{record.digest[:16] or record.state}. Find out which is right and remove the other."
            )
        longer = max(before.by_round, record.by_round, key=lambda each: len(each.get("rounds", ())))
        record = dataclasses.replace(before, analyses={**before.analyses, **record.analyses}, by_round=longer)
        if record == before:
            return path
    document = json.loads(json.dumps(record.as_json(), allow_nan=False))
    record_from(document, record.file)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text_of(document))
    return path


def text_of(document: Mapping[str, Any]) -> str:
    """A record as text: one entry per line, so that changes can be read."""
    lines = [f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Ledger:
    """All records of a folder, by what they are runs of."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda one: (one.identity, one.seed))
        self.loose: dict[str, list[Record]] = {}
        known: dict[tuple[str, int], Record] = {}
        for record in self.records:
            before = known.setdefault((identity_of(record.full_settings), record.seed), record)
            if before is not record:
                raise RunFolderError(f"{record.file} and {before.file} are the same run. Remove one of them.")
            self.loose.setdefault(loose_identity(record.full_settings), []).append(record)

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """The records of a folder; without the folder, none."""
        return cls(read_record(path) for path in sorted(folder.glob("*.json")))

    def exact(self, settings: Settings) -> dict[int, Record]:
        """The records with exactly these settings, by seed."""
        wanted = identity_of(settings)
        return {one.seed: one for one in self.loose.get(loose_identity(settings), []) if identity_of(one.full_settings) == wanted}

    def find(self, settings: Settings) -> dict[int, Record]:
        """The records for a cell, by seed.

        Runs that differ only in precision, memory layout, backend or selection of the last rounds count as well, but are never mixed:
        the group with the most seeds is taken; of two groups with equally many, the one with these settings. Runs of a group may differ
        in which rounds were scored besides; of two for the same seed, the one with exactly these settings is taken.
        """
        groups: dict[tuple[str, ...], dict[int, Record]] = {}
        exact = self.exact(settings)
        for record in self.loose.get(loose_identity(settings), []):
            group = groups.setdefault(_variant(record.full_settings), {})
            group[record.seed] = exact.get(record.seed, record) if _variant(settings) == _variant(record.full_settings) else record
        if not groups:
            return {}
        best = max(groups, key=lambda variant: (len(groups[variant]), variant == _variant(settings), variant))
        return dict(sorted(groups[best].items()))


def _variant(settings: Settings) -> tuple[str, ...]:
    """Return the values that must be equal in all runs of a cell."""
    return tuple(str(getattr(settings, name)) for name in (*VARIANT, "selection"))
