"""The list of the queue: the entries of benchmarks/queue.toml, and their runs, in order and without duplicates."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.papers.analyses import kinds_by_run
from polyfed.papers.costs import core_seconds
from polyfed.papers.files import read_item
from polyfed.papers.grid import Form, cells_of, planned_runs
from polyfed.papers.ledger import identity_of
from polyfed.runs.folder.paths import slug
from polyfed.settings import Settings

KEYS = ("experiment", "form", "only", "columns", "seeds", "set", "analyses", "command", "name", "hours", "max_hours", "lr_from")


@dataclass(frozen=True)
class Job:
    """One process of the queue: a run with one seed, or a command.

    Attributes:
        key: its name in logs and files.
        entry: the name of the entry that it belongs to.
        settings: of the run, with its seed; None for a command.
        analyses: kinds of analyses that its record needs.
        command: the words of a command.
        seconds: estimated core-seconds; None if unknown.
        has_log: the log of a rate search that the command would write exists.
    """

    key: str
    entry: str
    settings: Settings | None = None
    analyses: tuple[str, ...] = ()
    command: str = ""
    seconds: float | None = None
    has_log: bool = False

    @property
    def identity(self) -> str:
        """Name of its settings without the seed."""
        return "" if self.settings is None else identity_of(self.settings)


@dataclass
class Expanded:
    """All jobs in order, and why an entry has none."""

    jobs: list[Job] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def read_list(path: Path) -> list[dict[str, Any]]:
    """Read the entries of a list. ``max_hours`` at the top is the default of all entries."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = [{"max_hours": document.get("max_hours", math.inf), **entry} for entry in document.get("queue", [])]
    for entry in entries:
        for key in entry:
            if key not in KEYS:
                raise SettingError(f"{path.name}: unknown key {key!r}. {nearest(key, KEYS)}")
        if ("experiment" in entry) == ("command" in entry):
            raise SettingError(f"{path.name}: an entry needs either experiment or command: {entry}")
    return list(entries)


def name_of(entry: Mapping[str, Any]) -> str:
    """Label of an entry in the progress."""
    if "name" in entry or "command" in entry:
        return str(entry.get("name", entry.get("command")))
    words = [
        entry["experiment"],
        entry.get("form", "full"),
        ", ".join(_many(entry.get("columns"))),
        ", ".join(_many(entry.get("only"))),
    ]
    words += [f"{name}={value}" for name, value in entry.get("set", {}).items()]
    return "; ".join(filter(None, words))


def _many(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def expand(entries: Sequence[Mapping[str, Any]], root: str, log_folders: Sequence[Path] = ()) -> Expanded:
    """Return the jobs of a list. A run of several entries is one job at its first position, with the analyses of all of them.

    Args:
        entries: of the list.
        root: Data folder.
        log_folders: folders that ``lr_from`` is relative to; the first one that has the log counts.
    """
    found = Expanded()
    places: dict[str, int] = {}
    for entry in entries:
        name = name_of(entry)
        try:
            jobs = _jobs(entry, name, root, log_folders)
        except PolyfedError as error:
            found.problems[name] = str(error)
            continue
        for job in jobs:
            if job.key not in places:
                places[job.key] = len(found.jobs)
                found.jobs.append(job)
            else:
                before = found.jobs[places[job.key]]
                both = tuple(dict.fromkeys([*before.analyses, *job.analyses]))
                found.jobs[places[job.key]] = dataclasses.replace(before, analyses=both)
    return found


def _found_log(name: str, folders: Sequence[Path]) -> Path | None:
    return next((folder / name for folder in folders if name and (folder / name).is_file()), None)


def _written_log(command: str) -> str:
    """Return the rate log that a command writes, relative to the results; empty if it writes none.

    >>> _written_log("{python} benchmarks/choose_rate.py fedstein/table-1 --log {results}/rates/fedstein.json")
    'rates/fedstein.json'
    """
    _, _, after = command.partition(" --log {results}/")
    return after.split()[0] if after else ""


def _jobs(entry: Mapping[str, Any], name: str, root: str, log_folders: Sequence[Path]) -> list[Job]:
    hours = entry.get("hours")
    if "command" in entry:
        command = str(entry["command"])
        has_log = _found_log(_written_log(command), log_folders) is not None
        seconds = None if hours is None else 3600 * hours
        return [Job(f"command-{slug(name)}", name, command=command, seconds=seconds, has_log=has_log)]
    seeds = entry.get("seeds")
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.get("set", {}).items()}
    if "lr_from" in entry:
        log = _found_log(entry["lr_from"], log_folders)
        if log is None:
            raise SettingError(f"It waits for {entry['lr_from']}, the log of a rate search.")
        changes["lr"] = json.loads(log.read_text(encoding="utf-8"))["chosen"]
    form = Form(
        str(entry.get("form", "full")),
        _many(entry.get("only")),
        seeds if isinstance(seeds, int) else None,
        {**changes, "root": root},
        columns=_many(entry.get("columns")),
    )
    item = read_item(str(entry["experiment"]))
    cells = cells_of(item, form)
    runs, kinds = planned_runs(cells, form), kinds_by_run(item, cells)
    if not runs:
        raise SettingError(f"No cell of this entry can be run. Look at polyfed show {item.name}.")
    jobs = []
    numbers = {folder: list(seeds) if isinstance(seeds, list) else list(range(run.seeds)) for folder, run in runs.items()}
    # Seed by seed, so that all rows run with the first seed before any row runs with the second.
    for seed in sorted({seed for many in numbers.values() for seed in many}):
        for folder, run in runs.items():
            if seed in numbers[folder]:
                settings = dataclasses.replace(run.settings, seed=seed)
                asked = (*kinds.get(folder, ()), *_many(entry.get("analyses")))
                seconds = core_seconds(settings) if hours is None else 3600 * hours
                jobs.append(
                    Job(f"{identity_of(settings)}-seed{seed}", name, settings, tuple(dict.fromkeys(asked)), seconds=seconds)
                )
    longest = max((job.seconds or 0.0 for job in jobs), default=0.0) / 3600
    if longest > entry.get("max_hours", math.inf):
        raise SettingError(f"A run would take about {longest:.1f} core-hours, more than max_hours = {entry['max_hours']}.")
    return jobs
