"""Trials of a search: values that are trained and scored on validation data. Each is a run folder, read back if it is finished."""

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
"""What ends the names of runs that may be stopped early: they are not taken for whole ones."""
VALIDATION = "validation"


@dataclass(frozen=True)
class Trial:
    values: Values
    settings: Settings
    folder: Path


@dataclass(frozen=True)
class Score:
    """What validation said of a trial.

    Attributes:
        trial: the trial.
        validation: the mean over clients of the metric of the search; None where training failed.
        clients: that metric of each client.
        problem: why training failed.
        stopped: the round after which it was stopped since it was behind; None where it was trained to its end.
    """

    trial: Trial
    validation: float | None
    clients: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    stopped: int | None = None

    @property
    def rounds(self) -> int:
        """The rounds that count against the budget; a trial that failed counts as a whole one."""
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
        """The settings of the chosen runs that are this method's own: those it was given, and those that were searched."""
        chosen = {} if self.chosen is None else self.chosen.trial.values
        return {**self.candidate.own, **{name: value for name, value in chosen.items() if "." not in name}}

    @property
    def rounds(self) -> int:
        return sum(score.rounds for score in self.scores)


class Searcher:
    """Trains and validates trials, on data whose tests cannot be read."""

    def __init__(self, data: DataSet, sweep: Sweep) -> None:
        self.data, self.sweep = data, sweep

    def search(self, one: Searched) -> None:
        """Score every trial of a method and choose the best; the first of equals."""
        sweep, axes = self.sweep, axes_of_method(self.sweep.axes, one.candidate.text)
        proposals = Proposals(one.method, axes, grid(axes) if sweep.is_grid else [], sweep.sampler, sweep.settings.seed)
        while self._has_budget(one):
            try:
                values, asked = proposals.ask()
            except NoCombinationLeft:
                if not (sweep.halving and one.scores):
                    raise
                break  # the rounds that stopped trials have saved find nothing more to try
            words = f"{one.method}, {values_words(values)}"
            try:
                score = self._score(one.candidate, values, sweep.next_run(words), asked)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.scores.append(score)
            proposals.tell(asked, score.validation, score.stopped is not None)
            if score.validation is None:
                sweep.message(f"{words}: {score.problem}")
            sweep.write()
        finished = [score for score in one.scores if score.validation is not None and score.stopped is None]
        if finished:
            one.chosen = max(finished, key=lambda score: score.validation or 0.0)
        else:
            one.problem = f"No setting could be trained. {one.scores[0].problem}"

    def _has_budget(self, one: Searched) -> bool:
        """Return True if a method has a trial left: one of its number, or the rounds for one more if trials are stopped early."""
        if not self.sweep.halving or not one.scores:
            return len(one.scores) < self.sweep.trials
        whole = one.scores[0].trial.settings.rounds
        return one.rounds + whole <= self.sweep.trials * whole and len(one.scores) < MAX_RUNS

    def _score(self, method: Candidate, values: Values, heard_by: Callbacks, asked: optuna.Trial) -> Score:
        """Score one trial: read back, resumed or trained. A trial whose training fails is remembered as failed."""
        sweep = self.sweep
        settings = applied(method.settings(sweep.settings), method.text, values)
        experiment = Experiment(trial_settings(settings), self.data)
        experiment.set_headline(sweep.headline)
        name = name_of(experiment.settings, values, self.data.source, sweep.chosen_by(settings, sweep.halving))
        trial = Trial(values, experiment.settings, sweep.folder / "trials" / (name + _STOPPABLE * sweep.halving))
        for notice in experiment.notices:
            sweep.message(notice)
        halving = [_Rungs(asked, trial.folder, sweep.metric)] if sweep.halving else []
        failure = trial.folder / "failed.json"
        if failure.exists():
            return Score(trial, None, problem=json.loads(failure.read_text())["problem"])
        try:
            result = retry_when_free(lambda: self.trained(trial, experiment, [heard_by, *halving]), sweep.message)
        except (ClientFailure, TooFewReplies) as error:
            failure.write_text(json.dumps({"problem": str(error)}))
            return Score(trial, None, problem=str(error))
        for rungs_of_trial in halving:
            rungs_of_trial.read()  # another process may have trained it
        heard_by.end_reused(result)
        clients = {row.client: value_by(sweep.metric, row.numbers, row.client) for row in result.rows}
        reached = result.experiment.server.round
        stopped = reached if reached < result.experiment.server.rounds else None
        return Score(trial, statistics.fmean(clients.values()), clients, stopped=stopped)

    def trained(self, trial: Trial, experiment: Experiment, callbacks: Sequence[Callback]) -> Result:
        """Return the trial's run, scored on validation data."""
        if (trial.folder / "run.toml").exists():
            return resume(trial.folder, self.data, Reopening(trusted=trial.settings.trust), callbacks, VALIDATION)
        return train_run(experiment, RunFolder(trial.folder), callbacks, VALIDATION)


class _Rungs(Callback):
    """Stops a trial at a rung of successive halving if it is behind the trials before it.

    The scores at the rungs are kept in the run folder: a finished trial reports them again when a search is resumed.
    """

    def __init__(self, asked: optuna.Trial, folder: Path, metric: str) -> None:
        self.asked, self.file, self.metric = asked, folder / "rungs.json", metric
        self.scores: list[float] = []
        self.behind: list[bool] = []
        self.read()

    def read(self) -> None:
        """Report the scores in the file that were not reported yet."""
        if self.file.exists():
            self.scores = json.loads(self.file.read_text())
        for rung in range(len(self.behind), len(self.scores)):
            self.behind.append(is_behind(self.asked, rung, self.scores[rung]))

    def begin(self, run: RunState) -> bool | None:
        self.read()
        return self.after_round(run)  # it may have been stopped at a rung before it was judged

    def after_round(self, run: RunState) -> bool | None:
        found = rungs(run.rounds)
        if run.round not in found:
            return None
        rung = found.index(run.round)
        if rung > len(self.behind):
            return None  # an earlier polyfed judged it at the rungs before, and left no scores
        if rung == len(self.behind):
            values = [value_by(self.metric, row.numbers, row.client) for row in run.score(VALIDATION)]
            write_atomically(self.file, json.dumps([*self.scores, statistics.fmean(values)]))
            self.read()
        return self.behind[rung]


def name_of(settings: Settings, values: Values, source: str, chosen_by: str = "") -> str:
    """Return a folder name that differs if the settings or the data do, or the metric if it decides how the run ends."""
    described = {name: value for name, value in settings.to_dict().items() if name not in ("checkpoint_every", "metric")}
    described["method"] = parse(settings.method).full_text  # a default may change between two searches
    described |= {"chosen_by": chosen_by} if chosen_by else {}
    digest = hashlib.sha256(json.dumps([described, source], sort_keys=True).encode()).hexdigest()[:10]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{settings.method} {values_words(values)} seed{settings.seed}").strip("-.")[
        :LONGEST_NAME
    ]
    return f"{words.rstrip('-.')}-{digest}"


def values_words(values: Values) -> str:
    """Values in words.

    >>> values_words({"lr": 0.03, "fedprox.mu": 0.01})
    'lr=0.03 fedprox.mu=0.01'
    """
    return " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())


def edges(one: Searched, axes: Sequence[Axis]) -> list[str]:
    """Names whose chosen value is the smallest or largest of three or more numbers tried: better ones may lie beyond."""
    if one.chosen is None:
        return []
    found = []
    for axis in axes:
        numbers = [v for v in axis.values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(set(numbers)) > 2 and one.chosen.trial.values.get(axis.name) in (min(numbers), max(numbers)):
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
