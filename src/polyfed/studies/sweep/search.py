"""A search for settings, chosen on source-validation data; only then is anything tested.

The search gets a data set whose test sets cannot be read, so no choice can depend on them. Every method has the same number of
trials, or, where trials that are behind are stopped early, the same number of rounds. Optuna proposes what is tried
(``proposals.py``). Each trial is a run folder: a search that was stopped goes on, and finished trials are read back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyfed.core.conversation import EVALUATION
from polyfed.core.data_types import DataSet
from polyfed.core.metrics import MEASURES
from polyfed.core.tasks.known import value_by
from polyfed.core.tasks.task import Headline
from polyfed.errors import ClientFailure, PolyfedError, RunFolderError, SettingError, TooFewReplies
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import Callback, Callbacks, RunState
from polyfed.runs.callbacks.progress import default_callbacks
from polyfed.runs.callbacks.training_metrics import OF_TRAINING
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.checkpoint import Checkpoints
from polyfed.runs.folder.lock import once_free
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder, versions
from polyfed.runs.headline import headline
from polyfed.runs.lifecycle import facts_of, resume, train_run
from polyfed.runs.result import Result
from polyfed.runs.training_defaults import with_one_model
from polyfed.setting_facts import MOST_RUNS, require_count
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import Candidate, candidates
from polyfed.studies.report.comparison import require_pandas, row_json
from polyfed.studies.report.run_record import RunRecord
from polyfed.studies.report.run_set import MethodRow
from polyfed.studies.report.sections import trial_rows
from polyfed.studies.report.words import json_values, percent
from polyfed.studies.sweep.data import ReadTooSoon, need_validation, trial_settings, with_validation, without_tests
from polyfed.studies.sweep.proposals import SAMPLERS, NoCombinationLeft, Proposals, check_sampler, open_store, rungs
from polyfed.studies.sweep.space import Axis, Values, applied, axes_of_method, check_axes, grid, trials_of_each
from polyfed.studies.sweep.trials import Score, Searched, Trial, edges, name_of, score_json, values_words

FORMAT = 1
FILE = "sweep.json"
VALIDATION = "validation"
STOPPABLE = "-stoppable"
"""What ends the names of runs that may be stopped early: they are not taken for whole ones."""


class Sweep:
    """A search over several methods, and the tests of what it chose."""

    def __init__(
        self,
        settings: Settings,
        methods: Any,
        axes: Sequence[Axis],
        folder: str | Path,
        *,
        trials: int | None = None,
        sampler: str = SAMPLERS[0],
        halving: bool = False,
        seeds: int = 1,
        hold_out: float | None = None,
        data: DataSet | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            settings: of every run, where the search does not set them.
            methods: as ``runs/candidates.py`` reads them.
            axes: what is searched.
            folder: where run folders, sweep.json and Optuna's file go.
            trials: of each method; None: a grid.
            sampler: who proposes what is not on a grid: ``tpe`` or ``random``.
            halving: stop trials that are behind after a ninth and a third of their rounds, and spend the rounds on further ones.
            seeds: final runs of each method: the settings' seed, and the next ones.
            hold_out: share of the training data to validate on, where the data have no validation part.
            data: the data set; default: the one the settings name.
            callbacks: Called for every trial and final run.
        """
        require_count("seeds", seeds)
        found = list(candidates(methods, settings.load, settings.trust).values())
        require_texts(found)
        check_axes(axes, found, settings)
        check_sampler(sampler)
        self.settings, self.axes, self.folder = settings, list(axes), Path(folder)
        self.is_grid, self.sampler, self.halving = trials is None, sampler, halving
        self.seeds = [settings.seed + step for step in range(seeds)]
        self.hold_out, self.callbacks = hold_out, default_callbacks(callbacks)
        self.message = Callbacks(self.callbacks).message
        self.trials = trials_of_each([one.text for one in found], axes, trials)
        self.searched = [Searched(one) for one in found]
        self.data_by_name = data is None
        self.whole = build_data_set(settings.data, settings) if data is None else data
        if "model" not in {axis.name for axis in axes}:
            self.settings = with_one_model(settings, self.whole.default_model, [one.method for one in found])
        self.headline: Headline | None = None
        self.total = len(found) * (self.trials + seeds)
        self.begun = 0

    def run(self) -> list[Searched]:
        """Search, choose, then test."""
        searcher = Searcher(self.data_of_search(), self)
        for one in self.searched:
            searcher.search(one)
            self.write()
        for one in self.searched:
            if one.chosen is not None:
                self.test(one)
            self.write()
        return self.searched

    def data_of_search(self) -> DataSet:
        """Return what trials see: no test set can be read. Its training labels choose the metric of the search."""
        data = without_tests(self.whole)
        if self.hold_out is not None:
            data = with_validation(data, self.hold_out, self.settings.seed, self.settings.unseen)
        federation = build_federation(data, trial_settings(self.settings))
        need_validation(federation)
        self.headline = headline(self.settings.metric, federation)
        return data

    def next_run(self, words: str) -> Callbacks:
        """Return the callbacks of the next run."""
        self.begun += 1
        return Callbacks(self.callbacks, words, self.begun - 1, self.total)

    def test(self, one: Searched) -> None:
        """Train the chosen setting once per seed, and test it."""
        assert one.chosen is not None
        for seed in self.seeds:
            words = f"{one.chosen.trial.settings.method}, {values_words(one.chosen.trial.values)}, seed {seed}, test"
            heard_by = self.next_run(words)
            try:
                result = once_free(functools.partial(self.final, one.chosen.trial, seed, heard_by), self.message)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.outcomes.append(result.summary())
            one.records.append(RunRecord.from_result(result))
            heard_by.end_reused(result)

    def final(self, trial: Trial, seed: int, heard_by: Callbacks) -> Result:
        """The chosen setting with one seed: read, resumed, taken over from its trial, or trained."""
        settings = dataclasses.replace(trial.settings, seed=seed, unseen_part=self.settings.unseen_part)
        experiment = Experiment(settings, self.whole)
        experiment.head_by(self.headline)
        # A run folder that holds the name of its data needs nothing more: polyfed resume builds them again.
        experiment.given = [] if self.data_by_name else ["data"]
        folder = RunFolder(self.folder / "final" / name_of(experiment.settings, {}, self.whole.source, self.chosen_by(settings)))
        if (folder.path / "run.toml").exists():
            return resume(folder.path, self.whole, Reopening(trusted=settings.trust), [heard_by])
        if seed == trial.settings.seed and self.hold_out is None and not trial.settings.evaluate_every:
            return taken_over(trial, experiment, folder)
        return train_run(experiment, folder, [heard_by])

    def document(self) -> dict[str, Any]:
        """Everything tried, the chosen values, and the results."""
        return {
            "format": FORMAT,
            "settings": self.settings.to_dict(),
            "source": self.whole.source,
            "search": "grid" if self.is_grid else self.sampler,
            "halving": self.halving,
            "searched": {axis.name: list(axis.values) for axis in self.axes},
            "chosen_by": f"mean over clients of the {MEASURES[self.metric]} on source-validation data",
            "hold_out": self.hold_out,
            "trials_per_method": self.trials,
            "final_seeds": self.seeds,
            "methods": [self.method_json(one) for one in self.searched],
            "made_with": versions(),
        }

    def rows(self) -> list[MethodRow]:
        """The tests of what was chosen, a row for each method."""
        return [
            MethodRow(one.method, problem=one.problem or "it was not searched", own=one.candidate.own)
            if one.problem or one.chosen is None
            else MethodRow(Candidate(one.chosen.trial.settings.method, one.own).label, one.records, self.metric, one.own)
            for one in self.searched
        ]

    @property
    def metric(self) -> str:
        """The metric that chooses settings and heads the tests: the requested one, or chosen from training labels before the first trial."""
        return self.whole.task.main_measure if self.headline is None else self.headline.measure

    def chosen_by(self, settings: Settings, stoppable: bool = False) -> str:
        """Return the metric if it decides how a run ends and is not the main one; the run's name has it then."""
        decides = stoppable or settings.needs_validation
        return self.metric if decides and self.metric != self.whole.task.main_measure else ""

    def as_json(self) -> dict[str, Any]:
        """The search as ``polyfed sweep --json`` prints it."""
        tests = [row_json(row) for row in self.rows()]
        found: dict[str, Any] = json_values({**self.document(), "tests": tests, "out": str(self.folder)})
        return found

    def table(self) -> Any:
        """Every trial as a pandas frame: its method and values, its score on validation data as a fraction, and whether it was chosen."""
        pandas = require_pandas("table()")
        return pandas.DataFrame(
            [
                {
                    "method": one.method,
                    **score.trial.values,
                    "validation": math.nan if score.validation is None else score.validation,
                    "chosen": one.chosen is not None and score.trial.folder == one.chosen.trial.folder,
                }
                for one in self.searched
                for score in one.scores
            ]
        )

    def _repr_html_(self) -> str:
        axes = [axis.name for axis in self.axes]
        heads = "".join(f"<th>{escape(name)}</th>" for name in ("method", *axes, "validation, %", ""))
        rows = [row for one in self.document()["methods"] for row in trial_rows(one, axes)]
        lines = "".join(
            "<tr>"
            + "".join(
                f"<td>{escape(text)}</td>"
                for text in (row["method"], *row["tried"], row["validation"], "chosen" if row["chosen"] else "")
            )
            + "</tr>"
            for row in rows
        )
        first, *tests = repr(self).split("\n")
        said = "".join(f"<p>{escape(line)}</p>" for line in tests)
        return f"<table><caption>{escape(first)}</caption><tr>{heads}</tr>{lines}</table>{said}"

    def __repr__(self) -> str:
        lines = [f"search of {', '.join(axis.name for axis in self.axes)} on {self.settings.data}, {FILE} in {self.folder}"]
        for one, row in zip(self.searched, self.rows(), strict=True):
            if one.chosen is None or row.mean is None:
                lines.append(f"{one.method}: {row.problem}")
            else:
                values = values_words(one.chosen.trial.values)
                lines.append(f"{one.method}: {values}, test mean {percent(row.mean.value, row.mean.error)} %")
        return "\n".join(lines)

    def method_json(self, one: Searched) -> dict[str, Any]:
        """One method as JSON."""
        return {
            "method": one.method,
            "rounds": one.rounds,
            "trials": [score_json(score, self.folder) for score in one.scores],
            "chosen": None if one.chosen is None else score_json(one.chosen, self.folder),
            "at_the_edge": edges(one, self.axes),
            "tests": [
                {key: made[key] for key in ("seed", "method", "rounds", "accuracy", "metric", "headline", "digest", "run")}
                for made in one.outcomes
            ],
            "problem": one.problem or None,
        }

    def write(self) -> None:
        """Write sweep.json."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / FILE, json.dumps(self.document(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise RunFolderError(f"Cannot write to {self.folder}: {error.strerror or error}. Choose another --out.") from error


class Searcher:
    """Trains and validates trials, on data whose tests cannot be read."""

    def __init__(self, data: DataSet, sweep: Sweep) -> None:
        self.data, self.sweep, self.settings, self.halving = data, sweep, sweep.settings, sweep.halving
        self.folder, self.message, self.write = sweep.folder / "trials", sweep.message, sweep.write
        self.store = open_store(sweep.folder)

    def proposals(self, one: Searched) -> Proposals:
        """What is tried for a method."""
        sweep, axes = self.sweep, axes_of_method(self.sweep.axes, one.candidate.text)
        about = [sweep.settings.to_dict(), self.data.source, sweep.is_grid, sweep.halving]
        about += [sweep.metric] if sweep.metric != self.data.task.main_measure else []
        start = grid(axes) if sweep.is_grid else []
        return Proposals(sweep.folder, self.store, one.method, axes, start, sweep.sampler, sweep.settings.seed, about)

    def search(self, one: Searched) -> None:
        """Score every trial of a method and choose the best; the first of equals."""
        proposals = self.proposals(one)
        while self.has_budget(one):
            number = len(one.scores)
            try:
                values = proposals.values(number)
            except NoCombinationLeft:
                if not (self.halving and one.scores):
                    raise
                break  # the rounds that stopped trials have saved find nothing more to try
            words = f"{one.method}, {values_words(values)}"
            heard_by = self.sweep.next_run(words)
            try:
                score = self.score(
                    one.candidate, values, heard_by, Rungs(proposals, number, self.sweep.metric) if self.halving else None
                )
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.scores.append(score)
            proposals.tell(number, score.validation, score.stopped is not None)
            if score.validation is None:
                self.message(f"{words}: {score.problem}")
            self.write()
        worked = [score for score in one.scores if score.can_be_chosen]
        if worked:
            one.chosen = max(worked, key=lambda score: score.validation or 0.0)
        else:
            one.problem = f"No setting could be trained. {one.scores[0].problem}"

    def has_budget(self, one: Searched) -> bool:
        """Whether a method has a trial left: one of its number, or the rounds for one more where trials are stopped early."""
        if not self.halving or not one.scores:
            return len(one.scores) < self.sweep.trials
        whole = one.scores[0].trial.settings.rounds
        return one.rounds + whole <= self.sweep.trials * whole and len(one.scores) < MOST_RUNS

    def score(self, method: Candidate, values: Values, heard_by: Callbacks, rungs: Rungs | None = None) -> Score:
        """One trial: read back, resumed or trained. A trial whose training fails is remembered as failed."""
        settings = applied(method.settings(self.settings), method.text, values)
        experiment = Experiment(trial_settings(settings), self.data)
        experiment.head_by(self.sweep.headline)
        chosen_by = self.sweep.chosen_by(settings, rungs is not None)
        name = name_of(experiment.settings, values, self.data.source, chosen_by) + (STOPPABLE if rungs else "")
        trial = Trial(values, experiment.settings, self.folder / name)
        for notice in experiment.notices:
            self.message(notice)
        failure = trial.folder / "failed.json"
        if failure.exists():
            return Score(trial, None, problem=json.loads(failure.read_text())["problem"])
        try:
            result = once_free(lambda: self.trained(trial, experiment, [heard_by, *([rungs] if rungs else [])]), self.message)
        except (ClientFailure, TooFewReplies) as error:
            failure.write_text(json.dumps({"problem": str(error)}))
            return Score(trial, None, problem=str(error))
        heard_by.end_reused(result)
        clients = {row.client: value_by(self.sweep.metric, row.numbers, row.client) for row in result.rows}
        reached = result.experiment.server.round
        stopped = reached if reached < result.experiment.server.rounds else None
        return Score(trial, statistics.fmean(clients.values()), clients, stopped=stopped)

    def trained(self, trial: Trial, experiment: Experiment, callbacks: Sequence[Callback]) -> Result:
        """The trial's run, scored on validation data."""
        if (trial.folder / "run.toml").exists():
            return resume(trial.folder, self.data, Reopening(trusted=trial.settings.trust), callbacks, VALIDATION)
        return train_run(experiment, RunFolder(trial.folder), callbacks, VALIDATION)


class Rungs(Callback):
    """Stops the run of a trial at a rung of successive halving where it is behind the trials before it."""

    def __init__(self, proposals: Proposals, number: int, measure: str) -> None:
        self.proposals, self.number, self.measure = proposals, number, measure

    def begin(self, run: RunState) -> bool | None:
        return self.after_round(run)  # it may have been stopped at a rung before it was judged

    def after_round(self, run: RunState) -> bool | None:
        found = rungs(run.rounds)
        if run.round not in found:
            return None
        rung = found.index(run.round)
        scores = [value_by(self.measure, row.numbers, row.client) for row in run.score(VALIDATION)]
        self.proposals.report(self.number, rung, statistics.fmean(scores))
        return self.proposals.is_behind(self.number, rung)


def require_texts(found: Sequence[Candidate]) -> None:
    """Refuse methods that their text does not stand for: their trials could not be found again."""
    for one in found:
        if one.value is not None:
            raise SettingError(f"A search finds its trials again by their settings, so methods are given as texts: {one.text!r}.")


def taken_over(trial: Trial, experiment: Experiment, folder: RunFolder) -> Result:
    """The end of a trial as a run of its own, tested: training it again would give the same bits."""
    snapshot, _ = RunFolder(trial.folder).read()
    if snapshot is None:
        return train_run(experiment, folder)
    beginning = experiment.snapshot()
    experiment.restore(snapshot)
    # What validation cost belongs to the search, not to this run.
    costs = experiment.costs
    for direction in costs.bytes.values():
        direction.pop(EVALUATION, None)
    costs.messages.pop(EVALUATION, None)
    costs.seconds.pop("evaluation", None)
    with folder.locked():
        folder.create(experiment.settings, facts_of(experiment))
        # Should this be cut off, the run begins at round 0; metrics without any checkpoint would be taken for damage.
        beginning.notes |= {"metrics_size": 0, "finished": False, "best": None}
        Checkpoints(folder.checkpoints.folder).write(beginning, set(beginning.clients))
        folder.append([line for line in RunFolder(trial.folder).metrics() if line["view"] in OF_TRAINING])
        if snapshot.notes.get("best"):
            shutil.copytree(RunFolder(trial.folder).best.folder, folder.best.folder)
        return train_run(experiment, folder, resumed=True, best=snapshot.notes.get("best"))
