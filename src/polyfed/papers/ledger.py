"""The ledger: one small JSON record per finished run, from which the results pages are generated without run folders."""

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
"""Settings that every record contains, so that a new default does not change the meaning of old records."""
VARIANT = ("amp", "layout", "backend")
"""Settings that change only rounding. A cell shows such runs with a mark."""
LAST, MEAN_LAST = "last", "mean_last"
LAST_ONLY = "last round only"
_MACHINE_PATH = re.compile(r"(?<![\w.:/])(?:~|/(?:home|work|tmp|root|Users|mnt|media|data|opt|var|srv))/")
DEFAULTS: Mapping[str, Any] = {name: facts.default for name, facts in FACTS.items()}


@dataclass(frozen=True)
class Record:
    """One run of the ledger.

    Attributes:
        identity: Name of its settings without the seed.
        seed: Seed.
        state: finished or diverged.
        settings: Settings that differ from the defaults, and those of ``_ALWAYS``, without local folders.
        method: Method with all options.
        command: Command that repeats the run, with DATA as the data folder.
        commit: Commit of polyfed.
        versions: Versions of Python and packages.
        machine: Type of the machine.
        digest: Digest of the final state.
        cost: cpu_seconds, seconds, bytes_up, bytes_down.
        rounds: Number of trained rounds; for a diverged run, the round that failed.
        selected_round: Round of the reported model.
        last_rounds: Rounds whose test scores are averaged; empty if one round is reported.
        scores: Test scores by view and domain, as fractions, with ``count``.
        by_round: Test scores of all evaluated rounds: ``rounds``, and ``scores`` with one list per metric.
        validation: Mean validation scores of clients: ``rounds``, and one list per metric.
        right: Packed bits of the correctly classified test images, by view, client and domain.
        data: Packed data files.
        analyses: Measured values by kind of analysis.
        error: Reason why the run diverged.
        notes: Remarks for the pages.
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
        """The settings with defaults and all options of the method."""
        return Settings.from_dict({**self.settings, "method": self.method, "seed": self.seed}, self.file)

    @property
    def selection(self) -> str:
        return str(self.settings["selection"])

    def rows(self) -> list[Row]:
        """Return the test scores as evaluation rows, one per view and domain."""
        return [_row(one) for one in self.scores]

    def rows_by_round(self) -> dict[int, list[Row]]:
        rounds = self.by_round.get("rounds", ())
        many = self.by_round.get("scores", ())
        return {number: [_row(one, place) for one in many] for place, number in enumerate(rounds)}

    def is_right(self) -> dict[tuple[str, str, str], np.ndarray]:
        """Return, for each test image, whether it was classified correctly, by view, client and domain."""
        return {(one["view"], one["client"], one["domain"]): _unpacked_bits(one["bits"], one["count"]) for one in self.right}

    def as_json(self) -> dict[str, Any]:
        """Convert the record to plain values, without empty ones."""
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
"""JSON types of entries; all others are strings."""


def _row(one: Mapping[str, Any], place: int | None = None) -> Row:
    numbers = {
        name: value[place] if place is not None and isinstance(value, list) else value
        for name, value in one.items()
        if name not in ("view", "domain")
    }
    return Row(one["view"], "", one["domain"], numbers)


def recorded_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings for a record: those that differ from the defaults, and those of ``_ALWAYS``, with lists instead of tuples."""
    written = settings.to_dict()
    return {
        name: written.get(name)
        for name in FACTS
        if name not in NOT_IN_NAME and name != "method" and (name in _ALWAYS or getattr(settings, name) != DEFAULTS[name])
    }


@functools.cache
def identity_of(settings: Settings) -> str:
    """Return the name of runs with these settings, for any seed and machine.

    New settings and method options do not change it, because defaults are omitted. ``evaluate_last`` is omitted as well: additional test
    scores affect neither the training nor the selected round.
    """
    method, counted = canonical(settings.method), recorded_settings(settings)
    counted.pop("evaluate_last", None)
    written = json.dumps(counted | {"method": method}, sort_keys=True).encode()
    return f"{data_slug(settings.data)}-{slug(method)[:30]}-{hashlib.sha256(written).hexdigest()[:10]}"


@functools.cache
def loose_identity(settings: Settings) -> str:
    """Return the identity without settings that affect only rounding or evaluation. Such runs can replace each other, with a mark."""
    changes: dict[str, Any] = {name: DEFAULTS[name] for name in VARIANT}
    if settings.selection.split("(")[0] in (LAST, MEAN_LAST):
        changes |= {"evaluate_every": DEFAULTS["evaluate_every"], "selection": LAST}
    return identity_of(dataclasses.replace(settings, **changes))


def marks_of(record: Record, wanted: Settings) -> tuple[str, ...]:
    """Return the differences between a record and the settings of a cell, and the record's notes."""
    found = [str(value) for name in VARIANT if (value := getattr(record.full_settings, name)) != getattr(wanted, name)]
    if record.selection == LAST and wanted.selection.startswith(MEAN_LAST):
        found.append(LAST_ONLY)
    if record.selection.startswith(MEAN_LAST) and wanted.selection == LAST:
        found.append(f"mean of the last {len(record.last_rounds)} rounds")
    return tuple(dict.fromkeys([*found, *record.notes]))


def packed_bits(right: np.ndarray) -> str:
    """Encode booleans as bits in base64.

    >>> packed_bits(np.array([True, False, True])), _unpacked_bits("oA==", 3).tolist()
    ('oA==', [True, False, True])
    """
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode()


def _unpacked_bits(text: str, count: int) -> np.ndarray:
    bits: np.ndarray = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8), count=count).astype(bool)
    return bits


def read_record(path: Path) -> Record:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path.name} is not a valid run record: {error}. Restore the file from a backup.") from error
    record = record_from(document, path.name)
    if record.file != path.name:
        raise RunFolderError(f"{path.name} contains the record of {record.file}. Rename the file.")
    return record


def record_from(document: Any, where: str) -> Record:
    def invalid(why: str) -> RunFolderError:
        return RunFolderError(f"{where} is not a valid run record: {why}. Restore the file from a backup.")

    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise invalid(f"its format is not {FORMAT}")
    values = {name: value for name, value in document.items() if name != "format"}
    for name in values:
        if name not in NAMES:
            raise invalid(f"unknown entry {name!r}. {nearest(name, NAMES)}".rstrip("."))
    for name in NAMES:
        if name not in values and name not in OPTIONAL:
            raise invalid(f"{name} is missing")
        kinds = KINDS.get(name, (str,))
        if name in values and (not isinstance(values[name], kinds) or isinstance(values[name], bool)):
            raise invalid(f"{name} is {values[name]!r:.60}")
    if values["state"] not in STATES:
        raise invalid(f"its state is {values['state']!r}")
    if "selection" not in values["settings"]:
        raise invalid("its settings have no selection")
    require_portable(document, where)
    for one in values.get("right", ()):
        if not {"view", "client", "domain", "count", "bits"} <= set(one):
            raise invalid("an entry of right is incomplete")
    record = Record(**values)
    _require_curves(record, invalid)
    Settings.from_dict({**record.settings, "method": record.method, "seed": record.seed}, where)
    return record


def _require_curves(record: Record, invalid: Any) -> None:
    """Check that each curve has one value per round, and that validation scores have no domain or view."""
    length = len(record.validation.get("rounds", ()))
    for name, values in record.validation.items():
        if not isinstance(values, list) or len(values) != length or any(isinstance(value, dict | list) for value in values):
            raise invalid(f"validation {name} must be a list of {length} numbers")
    length = len(record.by_round.get("rounds", ()))
    for one in record.by_round.get("scores", ()):
        if any(isinstance(value, list) and len(value) != length for value in one.values()):
            raise invalid(f"a test curve does not have {length} rounds")


def require_portable(document: Any, where: str) -> None:
    """Raise an error if a record contains a local folder."""
    if found := _MACHINE_PATH.search(json.dumps(document)):
        text = json.dumps(document)[found.start() : found.start() + 60]
        raise RunFolderError(f"{where} contains a local folder ({text}...). Write DATA or a relative path instead.")


def write_record(folder: Path, record: Record) -> Path:
    """Write a record, or merge it with an existing record of the same run and return its path.

    Args:
        folder: The ledger.
        record: The record.

    Raises:
        RunFolderError: If the existing record has a different digest or state.
    """
    path = folder / record.file
    if path.exists():
        before = read_record(path)
        if before.digest != record.digest or before.state != record.state:
            raise RunFolderError(
                f"{path.name} exists in the ledger with digest {before.digest[:16] or before.state}, but this run has "
                f"{record.digest[:16] or record.state}. Determine which one is correct, and remove the other."
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
    """Format a record with one entry per line, for readable diffs."""
    lines = [f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Ledger:
    """All records of a folder, by settings."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda one: (one.identity, one.seed))
        self.loose: dict[str, list[Record]] = {}
        known: dict[tuple[str, int], Record] = {}
        for record in self.records:
            before = known.setdefault((identity_of(record.full_settings), record.seed), record)
            if before is not record:
                raise RunFolderError(f"{record.file} and {before.file} are records of the same run. Remove one of them.")
            self.loose.setdefault(loose_identity(record.full_settings), []).append(record)

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        return cls(read_record(path) for path in sorted(folder.glob("*.json")))

    def exact(self, settings: Settings) -> dict[int, Record]:
        wanted = identity_of(settings)
        return {one.seed: one for one in self.loose.get(loose_identity(settings), []) if identity_of(one.full_settings) == wanted}

    def find(self, settings: Settings) -> dict[int, Record]:
        """Return the records for a cell, by seed.

        Runs may differ in precision, memory layout, backend or selection of the last rounds, but these groups are never mixed. The group
        with the most seeds is used, or of equally large ones the one with these settings. Runs of a group may differ in the evaluated rounds;
        of two runs with the same seed, the one with exactly these settings is used.
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
    return tuple(str(getattr(settings, name)) for name in (*VARIANT, "selection"))
