"""Analyses of runs: measured run by run, presented together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.result import Result
from polyfed.studies.analyse.kinds import KINDS, Analysis
from polyfed.studies.analyse.opened_run import opened


@dataclass(frozen=True)
class Skipped:
    """A kind of analysis that does not apply to a run (or to all runs together), and why."""

    kind: str
    run: str
    reason: str


@dataclass(frozen=True)
class Analyses:
    """What came of analysing some runs."""

    found: Sequence[Analysis]
    skipped: Sequence[Skipped]

    def __getitem__(self, kind: str) -> Analysis:
        """The analysis of one kind; where there is none, an error says why."""
        for one in self.found:
            if one.kind == kind:
                return one
        reasons = [f"{one.run}: {one.reason}" for one in self.skipped if one.kind == kind]
        raise SettingError(" ".join(reasons) if reasons else f"There is no analysis {kind!r} here. {nearest(kind, KINDS)}")

    def __iter__(self) -> Iterator[Analysis]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def as_json(self) -> dict[str, Any]:
        """Every number, and what does not apply."""
        skipped = [{"kind": one.kind, "run": one.run, "reason": one.reason} for one in self.skipped]
        return {"analyses": [one.as_json() for one in self.found], "skipped": skipped}

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self.found)


def kinds_named(names: Sequence[str]) -> list[str]:
    """The kinds of these names; none: all."""
    for name in names:
        if name not in KINDS:
            raise SettingError(f"There is no analysis {name!r}. {nearest(name, KINDS)}")
    return list(dict.fromkeys(names)) or list(KINDS)


def analyse_runs(
    runs: Sequence[str | Path | Result] | Mapping[str, str | Path | Result],
    kinds: Sequence[str] = (),
    how: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = print,
    begin: Callable[[str], None] = lambda _: None,
    reads_data: bool = True,
) -> Analyses:
    """Analyse runs: each is opened once, measured for every kind, and closed.

    Args:
        runs: run folders, or results; by label, or labelled here.
        kinds: names of kinds; default: all.
        how: how folders are opened (``root``, ``load``, ``device``, ``model``, ``trust``).
        notify: called with a sentence for each damaged file.
        begin: called with a few words before each measurement.
        reads_data: whether models and data of the runs may be opened, or only what is written in their folders.
    """
    names = kinds_named(kinds)
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    skipped: list[Skipped] = []
    for run in opened(runs, how or {}, notify, reads_data):
        for name in names:
            begin(f"{run.label}: {name}")
            try:
                measured[name][run.label] = KINDS[name].measure(run)
            except PolyfedError as error:
                skipped.append(Skipped(name, run.label, str(error)))
        run.forget()
    found = []
    for name in names:
        if measured[name]:
            try:
                found.append(KINDS[name].present(name, measured[name]))
            except PolyfedError as error:
                skipped.append(Skipped(name, "all runs", str(error)))
    return Analyses(found, skipped)


def from_folders(runs: Sequence[str | Path | Result], kinds: Sequence[str] = ()) -> Analyses:
    """The analyses that need nothing but what is written in the folders; the others are left out without a word."""
    names = [name for name in kinds_named(kinds) if not KINDS[name].needs_data]
    found = analyse_runs(runs, names, notify=lambda _: None, reads_data=False) if names else Analyses([], [])
    return Analyses(found.found, [])
