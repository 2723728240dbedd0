"""A run as analyses look at it: its folder, or the result of a run in this process; opened only as far as an analysis needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.core.evaluation import Row
from polyfed.errors import DataError, RunFolderError
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.final_files import Answers, read_answers
from polyfed.runs.folder.manifest import METRICS, newest_notes
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.reopen import open_experiment
from polyfed.runs.result import Result, accuracy_table
from polyfed.runs.scores import rows_at
from polyfed.settings import FACTS
from polyfed.studies.analyse.confidence import answers_of
from polyfed.studies.analyse.local_models import State, states_after_training
from polyfed.studies.analyse.score_grid import GridRun


@dataclass
class OpenedRun:
    """One run.

    Args:
        source: a run folder, or a result.
        label: what it is called in pictures and tables.
        how: how its folder is opened: ``root``, ``load``, ``device``, ``model``, ``trust``.
        notify: called with a sentence for each damaged file.
        reads_data: whether its models and data may be opened, or only what is written in its folder.
    """

    source: str | Path | Result
    label: str = ""
    how: Mapping[str, Any] = field(default_factory=dict)
    notify: Callable[[str], None] = print
    reads_data: bool = True

    @property
    def result(self) -> Result | None:
        """The result, where the run is one of this process."""
        return self.source if isinstance(self.source, Result) else None

    @cached_property
    def folder(self) -> RunFolder:
        path = self.source.path if isinstance(self.source, Result) else self.source
        if path is None:
            raise RunFolderError("The run has no folder, and rounds are written down only there. Train it with out=FOLDER.")
        return RunFolder(path)

    @cached_property
    def experiment(self) -> Experiment:
        """The run with its models and its data."""
        if not self.reads_data:
            raise DataError("This needs the run's models and data, and only its folder is read here (polyfed analyse opens both).")
        if isinstance(self.source, Result):
            return self.source.experiment
        return open_experiment(self.source, Reopening(**{"device": "auto", **self.how}, notify=self.notify), own_data=True)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its settings as plain values."""
        return (self.source.experiment.settings if isinstance(self.source, Result) else self.folder.settings()).to_dict()

    @cached_property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The lines of its metrics, up to its newest checkpoint."""
        notes = newest_notes(self.folder.checkpoints.folder)
        self.folder.require_sealed(METRICS, notes)
        return self.folder.sealed_lines(notes)

    @cached_property
    def answers(self) -> Answers:
        """The answer for each test image; asked again where the run left none."""
        if self.result is not None:
            return self.result.answers or answers_of(self.experiment)
        return read_answers(self.folder, newest_notes(self.folder.checkpoints.folder)) or answers_of(self.experiment)

    @cached_property
    def trained(self) -> dict[str, State]:
        """Clients' models after some steps of local training."""
        return dict(states_after_training(self.experiment))

    @property
    def rows(self) -> Sequence[Row]:
        """Its last scores."""
        if self.result is not None:
            return self.result.rows
        rounds = [line["round"] for line in self.lines if line["view"].removeprefix("selected_") in ("seen", "unseen")]
        return rows_at(self.lines, max(rounds)) if rounds else []

    def on_grid(self) -> GridRun:
        """The run as a cell of a grid."""
        if not self.rows:
            raise RunFolderError("The run was not scored yet.")
        chosen = {name: value for name, value in self.settings.items() if FACTS[name].changes_results}
        return GridRun(self.settings["method"], chosen, accuracy_table(self.rows)["mean"])

    def forget(self) -> None:
        """Give back what takes memory."""
        for name in ("experiment", "trained", "answers"):
            self.__dict__.pop(name, None)


def opened(
    runs: Sequence[str | Path | Result] | Mapping[str, str | Path | Result],
    how: Mapping[str, Any],
    notify: Callable[[str], None],
    reads_data: bool = True,
) -> list[OpenedRun]:
    """The runs, each with a label of its own: the one it was given, or its method, with the seed or the folder where that is not enough."""
    if isinstance(runs, Mapping):
        return [OpenedRun(run, label, how, notify, reads_data) for label, run in runs.items()]
    found = [OpenedRun(run, "", how, notify, reads_data) for run in runs]
    names = [
        (str(run.settings["method"]), f"{run.settings['method']}, seed {run.settings['seed']}", _folder_name(run)) for run in found
    ]
    labels: tuple[str, ...] = ()
    for labels in zip(*names, strict=True):
        if len(set(labels)) == len(labels):
            break
    for number, (run, label) in enumerate(zip(found, labels, strict=True), 1):
        run.label = label if labels.count(label) == 1 else f"{label} ({number})"
    return found


def _folder_name(run: OpenedRun) -> str:
    path = run.source.path if isinstance(run.source, Result) else run.source
    return f"{run.settings['method']}, seed {run.settings['seed']}" if path is None else Path(path).resolve().name
