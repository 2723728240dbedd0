"""Measure every analysis of each run, and present the runs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.result import Result
from polyfed.studies.analyse.kinds import KINDS, Analysis
from polyfed.studies.analyse.opened_run import open_runs


@dataclass(frozen=True)
class Skipped:
    """An analysis that does not apply to a run, or to all runs together, and the reason."""

    kind: str
    run: str
    reason: str


@dataclass(frozen=True)
class Analyses:
    """The analyses of a set of runs."""

    found: Sequence[Analysis]
    skipped: Sequence[Skipped]

    def __getitem__(self, kind: str) -> Analysis:
        for analysis in self.found:
            if analysis.kind == kind:
                return analysis
        reasons = [f"{one.run}: {one.reason}" for one in self.skipped if one.kind == kind]
        raise SettingError(" ".join(reasons) if reasons else f"There is no analysis {kind!r} here. {nearest(kind, KINDS)}")

    def __iter__(self) -> Iterator[Analysis]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers and the skipped analyses."""
        return {"analyses": [one.as_json() for one in self.found], "skipped": [asdict(one) for one in self.skipped]}

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self.found)


def kinds_named(names: Sequence[str]) -> list[str]:
    """Return these kinds without duplicates, or all kinds if ``names`` is empty."""
    for name in names:
        if name not in KINDS:
            raise SettingError(f"There is no analysis {name!r}. {nearest(name, KINDS)}")
    return list(dict.fromkeys(names)) or list(KINDS)


def analyse_runs(
    runs: Sequence[str | Path | Result] | Mapping[str, str | Path | Result],
    kinds: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = print,
    begin: Callable[[str], None] = lambda _: None,
    reads_data: bool = True,
) -> Analyses:
    """Open each run once and run every analysis on it. Without ``reads_data``, only files in the run folders are read.

    ``options`` specify how to open folders (``root``, ``load``, ``device``, ``model``, ``trust``). ``notify`` receives a message for each
    damaged file, ``begin`` a label before each measurement.
    """
    names = kinds_named(kinds)
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    skipped: list[Skipped] = []
    for run in open_runs(runs, options or {}, notify, reads_data):
        for name in names:
            begin(f"{run.label}: {name}")
            try:
                measured[name][run.label] = KINDS[name].measure(run)
            except PolyfedError as error:
                skipped.append(Skipped(name, run.label, str(error)))
        run.free_memory()
    found = []
    for name in names:
        if measured[name]:
            try:
                found.append(KINDS[name].present(name, measured[name]))
            except PolyfedError as error:
                skipped.append(Skipped(name, "all runs", str(error)))
    return Analyses(found, skipped)


def from_folders(runs: Sequence[str | Path | Result], kinds: Sequence[str] = ()) -> Analyses:
    """Run the analyses that only read the run folders, and ignore the others."""
    names = [name for name in kinds_named(kinds) if not KINDS[name].needs_data]
    found = analyse_runs(runs, names, notify=lambda _: None, reads_data=False).found if names else []
    return Analyses(found, [])
