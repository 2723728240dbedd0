"""Train the trials of a search and score them on validation data; finished trials are read from their run folders."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.data_types import DataSet
from polyfed.core.method import parse
from polyfed.errors import ClientFailure, PolyfedError, RunFolderError, TooFewReplies
from polyfed.runs.callbacks.callback import Callback, Callbacks, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.lock import retry_when_free
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.result import Result
from polyfed.setting_facts import MAX_RUNS
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import Candidate
from polyfed.studies.report.run_record import RunRecord
from polyfed.studies.sweep.data import ReadTooSoon, trial_settings
from polyfed.studies.sweep.proposals import NoCombinationLeft, Proposals, is_behind, rungs
from polyfed.studies.sweep.space import Axis, Values, applied, axes_of_method, grid
from polyfed.tasks.known import value_by

if TYPE_CHECKING:
    import optuna

    from polyfed.studies.sweep.search import Sweep

LONGEST_NAME = 60
_STOPPABLE = "-stoppable"
"""Suffix for folders of runs that may stop early, so that they are not mistaken for full runs."""
VALIDATION = "validation"


@dataclass(frozen=True)
class Trial:
    values: Values
    settings: Settings
    folder: Path


@dataclass(frozen=True)
class Score:
    """The validation score of a trial: the mean of the search metric over clients, or None if training failed.

    ``stopped`` is the round after which the trial was stopped early, or None.
    """

    trial: Trial
    validation: float | None
    clients: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    stopped: int | None = None

    @property
    def rounds(self) -> int:
        """Rounds that count towards the budget; a failed trial counts in full."""
        return self.trial.settings.rounds if self.stopped is None else self.stopped


@dataclass
class Searched:
    """The trials of one method, the chosen one, and its tests."""

    candidate: Candidate
    scores: list[Score] = field(default_factory=list)
    chosen: Score | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)
    problem: str = ""

    @property
    def method(self) -> str:
        return self.candidate.label

    @property
    def own(self) -> dict[str, Any]:
        """Per-method settings of the final runs: the given ones and the chosen ones."""
        chosen = {} if self.chosen is None else self.chosen.trial.values
        return {**self.candidate.own, **{name: value for name, value in chosen.items() if "." not in name}}

    @property
    def rounds(self) -> int:
        return sum(score.rounds for score in self.scores)


class Searcher:
    """The search phase: trains and validates trials on data whose test sets cannot be read."""

    def __init__(self, data: DataSet, sweep: Sweep) -> None:
        self.data, self.sweep = data, sweep

    def search(self, one: Searched) -> None:
        """Score all trials of a method and choose the best, or the first of equally good ones."""
        sweep, axes = self.sweep, axes_of_method(self.sweep.axes, one.candidate.text)
        proposals = Proposals(one.method, axes, grid(axes) if sweep.is_grid else [], sweep.sampler, sweep.settings.seed)
        while self._has_budget(one):
            try:
                values, optuna_trial = proposals.ask()
            except NoCombinationLeft:
                if not (sweep.halving and one.scores):
                    raise
                break  # no combination is left for the rounds saved by stopped trials
            label = f"{one.method}, {format_values(values)}"
            try:
                score = self._score(one.candidate, values, sweep.next_run(label), optuna_trial)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.scores.append(score)
            proposals.tell(optuna_trial, score.validation, score.stopped is not None)
            if score.validation is None:
                sweep.message(f"{label}: {score.problem}")
            sweep.write()
        finished = [score for score in one.scores if score.validation is not None and score.stopped is None]
        if finished:
            one.chosen = max(finished, key=lambda score: score.validation or 0.0)
        else:
            one.problem = f"All trials failed. {one.scores[0].problem}"

    def _has_budget(self, one: Searched) -> bool:
        """Return True if a method has a trial left, or the rounds for one more if trials stop early."""
        if not self.sweep.halving or not one.scores:
            return len(one.scores) < self.sweep.trials
        whole = one.scores[0].trial.settings.rounds
        return one.rounds + whole <= self.sweep.trials * whole and len(one.scores) < MAX_RUNS

    def _score(self, method: Candidate, values: Values, callbacks: Callbacks, optuna_trial: optuna.Trial) -> Score:
        """Read, resume or train one trial and score it. A failed trial is recorded and not repeated."""
        sweep = self.sweep
        settings = applied(method.settings(sweep.settings), method.text, values)
        experiment = Experiment(trial_settings(settings), self.data)
        experiment.set_headline(sweep.headline)
        name = name_of(experiment.settings, values, self.data.source, sweep.chosen_by(settings, sweep.halving))
        trial = Trial(values, experiment.settings, sweep.folder / "trials" / (name + _STOPPABLE * sweep.halving))
        for notice in experiment.notices:
            sweep.message(notice)
        halving = [_Rungs(optuna_trial, trial.folder, sweep.metric)] if sweep.halving else []
        failure = trial.folder / "failed.json"
        if failure.exists():
            return Score(trial, None, problem=json.loads(failure.read_text())["problem"])
        try:
            result = retry_when_free(lambda: self.train(trial, experiment, [callbacks, *halving]), sweep.message)
        except (ClientFailure, TooFewReplies) as error:
            failure.write_text(json.dumps({"problem": str(error)}))
            return Score(trial, None, problem=str(error))
        for rungs_of_trial in halving:
            rungs_of_trial.read()  # another process may have trained it
        callbacks.end_reused(result)
        clients = {row.client: value_by(sweep.metric, row.numbers, row.client) for row in result.rows}
        reached = result.experiment.server.round
        stopped = reached if reached < result.experiment.server.rounds else None
        return Score(trial, statistics.fmean(clients.values()), clients, stopped=stopped)

    def train(self, trial: Trial, experiment: Experiment, callbacks: Sequence[Callback]) -> Result:
        """Train or resume the trial's run, and score it on validation data."""
        if (trial.folder / "run.toml").exists():
            return resume(trial.folder, self.data, Reopening(trusted=trial.settings.trust), callbacks, VALIDATION)
        return train_run(experiment, RunFolder(trial.folder), callbacks, VALIDATION)


class _Rungs(Callback):
    """Early stopping of a trial that is worse than earlier trials at a rung of successive halving.

    The run folder keeps the scores at the rungs, so a resumed search can report them again.
    """

    def __init__(self, trial: optuna.Trial, folder: Path, metric: str) -> None:
        self.trial, self.file, self.metric = trial, folder / "rungs.json", metric
        self.scores: list[float] = []
        self.behind: list[bool] = []
        self.read()

    def read(self) -> None:
        """Report the scores in the file that are not yet reported."""
        if self.file.exists():
            self.scores = json.loads(self.file.read_text())
        for rung in range(len(self.behind), len(self.scores)):
            self.behind.append(is_behind(self.trial, rung, self.scores[rung]))

    def begin(self, run: RunState) -> bool | None:
        self.read()
        return self.after_round(run)  # the previous process may have ended at a rung before scoring

    def after_round(self, run: RunState) -> bool | None:
        found = rungs(run.rounds)
        if run.round not in found:
            return None
        rung = found.index(run.round)
        if rung > len(self.behind):
            return None  # an older polyfed handled the previous rungs without storing scores
        if rung == len(self.behind):
            values = [value_by(self.metric, row.numbers, row.client) for row in run.score(VALIDATION)]
            write_atomically(self.file, json.dumps([*self.scores, statistics.fmean(values)]))
            self.read()
        return self.behind[rung]


def name_of(settings: Settings, values: Values, source: str, chosen_by: str = "") -> str:
    """Return a folder name that is unique to the settings, the data, and the metric if it decides how the run ends."""
    described = {name: value for name, value in settings.to_dict().items() if name not in ("checkpoint_every", "metric")}
    described["method"] = parse(settings.method).full_text  # a default may change between two searches
    described |= {"chosen_by": chosen_by} if chosen_by else {}
    digest = hashlib.sha256(json.dumps([described, source], sort_keys=True).encode()).hexdigest()[:10]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{settings.method} {format_values(values)} seed{settings.seed}").strip("-.")
    return f"{label[:LONGEST_NAME].rstrip('-.')}-{digest}"


def format_values(values: Values) -> str:
    """Format values for labels and folder names.

    >>> format_values({"lr": 0.03, "fedprox.mu": 0.01})
    'lr=0.03 fedprox.mu=0.01'
    """
    return " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())


def edges(one: Searched, axes: Sequence[Axis]) -> list[str]:
    """Return the axes whose chosen value is the smallest or largest of several numbers, so a better one may be outside the range."""
    if one.chosen is None:
        return []
    found = []
    for axis in axes:
        numbers = [v for v in axis.values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(set(numbers)) > 1 and one.chosen.trial.values.get(axis.name) in (min(numbers), max(numbers)):
            found.append(axis.name)
    return found


def score_json(score: Score, folder: Path) -> dict[str, Any]:
    return {
        "values": dict(score.trial.values),
        "method": score.trial.settings.method,
        "rounds": score.trial.settings.rounds,
        "stopped_after": score.stopped,
        "validation": score.validation,
        "validation_by_client": dict(score.clients),
        "run": str(score.trial.folder.relative_to(folder)),
        "problem": score.problem or None,
    }
