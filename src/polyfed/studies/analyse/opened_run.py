"""Open a run folder, or the result of a run in this process, only as far as an analysis needs it."""

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
    """A run to analyse. Without ``reads_data``, only the files in its folder are read.

    ``options`` specify how to open the folder (``root``, ``load``, ``device``, ``model``, ``trust``).
    """

    source: str | Path | Result
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    notify: Callable[[str], None] = print
    reads_data: bool = True

    @cached_property
    def folder(self) -> RunFolder:
        path = self.source.path if isinstance(self.source, Result) else self.source
        if path is None:
            raise RunFolderError("This analysis needs the run folder, and the run has none. Train it with out=FOLDER.")
        return RunFolder(path)

    @cached_property
    def experiment(self) -> Experiment:
        if not self.reads_data:
            raise DataError("This needs the models and the data of the run. Use polyfed analyse, which opens both.")
        if isinstance(self.source, Result):
            return self.source.experiment
        return open_experiment(self.source, Reopening(**{"device": "auto", **self.options}, notify=self.notify), own_data=True)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return (self.source.experiment.settings if isinstance(self.source, Result) else self.folder.settings()).to_dict()

    @cached_property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """Metric lines up to the newest checkpoint."""
        notes = newest_notes(self.folder.checkpoints.folder)
        self.folder.require_sealed(METRICS, notes)
        return self.folder.sealed_lines(notes)

    @cached_property
    def answers(self) -> Answers:
        """Predictions for all test images, recomputed if the run stored none."""
        if isinstance(self.source, Result):
            return self.source.answers or answers_of(self.experiment)
        return read_answers(self.folder, newest_notes(self.folder.checkpoints.folder)) or answers_of(self.experiment)

    @cached_property
    def trained(self) -> dict[str, State]:
        """Client models after some steps of local training."""
        return dict(states_after_training(self.experiment))

    @property
    def rows(self) -> Sequence[Row]:
        """The last scores."""
        if isinstance(self.source, Result):
            return self.source.rows
        rounds = [line["round"] for line in self.lines if line["view"].removeprefix("selected_") in ("seen", "unseen")]
        return rows_at(self.lines, max(rounds)) if rounds else []

    def grid_cell(self) -> GridRun:
        if not self.rows:
            raise RunFolderError("The run has no scores yet.")
        chosen = {name: value for name, value in self.settings.items() if FACTS[name].changes_results}
        return GridRun(self.settings["method"], chosen, accuracy_table(self.rows)["mean"])

    def free_memory(self) -> None:
        for name in ("experiment", "trained", "answers"):
            self.__dict__.pop(name, None)


def open_runs(
    runs: Sequence[str | Path | Result] | Mapping[str, str | Path | Result],
    options: Mapping[str, Any],
    notify: Callable[[str], None],
    reads_data: bool = True,
) -> list[OpenedRun]:
    """Open runs under unique labels: the given ones, or the methods, followed by seeds or replaced by folder names if necessary."""
    if isinstance(runs, Mapping):
        return [OpenedRun(run, label, options, notify, reads_data) for label, run in runs.items()]
    found = [OpenedRun(run, "", options, notify, reads_data) for run in runs]
    labels: tuple[str, ...] = ()
    for labels in zip(*map(_label_choices, found), strict=True):
        if len(set(labels)) == len(labels):
            break
    for number, (run, label) in enumerate(zip(found, labels, strict=True), 1):
        run.label = label if labels.count(label) == 1 else f"{label} ({number})"
    return found


def _label_choices(run: OpenedRun) -> tuple[str, str, str]:
    method, path = str(run.settings["method"]), run.source.path if isinstance(run.source, Result) else run.source
    with_seed = f"{method}, seed {run.settings['seed']}"
    return method, with_seed, with_seed if path is None else Path(path).resolve().name
