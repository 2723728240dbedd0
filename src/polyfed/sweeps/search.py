"""A search for settings, chosen on source-validation data; only then is anything tested.

The search gets a data set whose test sets cannot be read, so no choice can depend on them. Every method has the same number
of trials. Each trial is a run folder: a search that was stopped goes on, and finished trials are read back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyfed.core.conversation import EVALUATION
from polyfed.core.data_types import DataSet
from polyfed.core.tasks.known import main_value
from polyfed.errors import ClientFailure, PolyfedError, RunFolderError, TooFewReplies
from polyfed.reports.json_values import json_values
from polyfed.reports.tables import MethodRow, method_row, outcome, percent, row_json
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.atomic_write import write_atomically
from polyfed.runs.checkpoint import Checkpoints
from polyfed.runs.client_spread import SPREAD
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import facts_of, resume, train_run
from polyfed.runs.lock import once_free
from polyfed.runs.result import Result
from polyfed.runs.run_folder import RunFolder, plain, versions
from polyfed.runs.watcher import Watcher
from polyfed.settings import Settings, require_count
from polyfed.sweeps.data import ReadTooSoon, need_validation, with_validation, without_tests
from polyfed.sweeps.space import Axis, Values, applied, check_axes, planned
from polyfed.sweeps.trials import Score, Searched, Trial, edges, name_of, score_json, values_words

FORMAT = 1
FILE = "sweep.json"
VALIDATION = "validation"


class Sweep:
    """A search over several methods, and the tests of what it chose."""

    def __init__(
        self,
        settings: Settings,
        methods: Sequence[str],
        axes: Sequence[Axis],
        folder: str | Path,
        *,
        random: int | None = None,
        seeds: int = 1,
        hold_out: float | None = None,
        data: DataSet | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            settings: of every run, where the search does not set them.
            methods: their texts.
            axes: what is searched.
            folder: where run folders and sweep.json go.
            random: number of random trials; None: a grid.
            seeds: final runs of each method: the settings' seed, and the next ones.
            hold_out: share of the training data to validate on, where the data have no validation part.
            data: the data set; default: the one the settings name.
            watcher: hears of every trial and final run.
        """
        require_count("seeds", seeds)
        check_axes(axes, methods, settings)
        self.settings, self.axes, self.folder, self.random = settings, list(axes), Path(folder), random
        self.seeds = [settings.seed + step for step in range(seeds)]
        self.hold_out, self.watcher = hold_out, watcher or Watcher()
        self.plans = planned(methods, axes, random, settings.seed)
        self.searched = [Searched(method) for method in methods]
        self.data_by_name = data is None
        self.whole = build_data_set(settings.data, settings) if data is None else data
        self.total = sum(len(plan) for plan in self.plans.values()) + len(methods) * seeds
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
        """What trials see: no test set can be read."""
        data = without_tests(self.whole)
        if self.hold_out is not None:
            data = with_validation(data, self.hold_out, self.settings.seed, self.settings.unseen)
        need_validation(build_federation(data, trial_settings(self.settings)))
        return data

    def begin(self, words: str) -> None:
        """Report that a run begins."""
        self.begun += 1
        self.watcher.begin(words, self.begun, self.total)

    def test(self, one: Searched) -> None:
        """Train the chosen setting once per seed, and test it."""
        assert one.chosen is not None
        for seed in self.seeds:
            words = f"{one.chosen.trial.settings.method}, {values_words(one.chosen.trial.values)}, seed {seed}, test"
            self.begin(words)
            try:
                result = once_free(functools.partial(self.final, one.chosen.trial, seed), self.watcher.notice)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.outcomes.append(outcome(result))
            self.watcher.end(words, result.words)

    def final(self, trial: Trial, seed: int) -> Result:
        """The chosen setting with one seed: read, resumed, taken over from its trial, or trained."""
        settings = dataclasses.replace(trial.settings, seed=seed, unseen_part=self.settings.unseen_part)
        experiment = Experiment(settings, self.whole)
        # A run folder that holds the name of its data needs nothing more: polyfed resume builds them again.
        experiment.given = [] if self.data_by_name else ["data"]
        folder = RunFolder(self.folder / "final" / name_of(experiment.settings, {}, self.whole.source))
        if (folder.path / "run.toml").exists():
            return resume(folder.path, self.whole, notify=self.watcher.notice, observers=[self.watcher.round])
        if seed == trial.settings.seed and self.hold_out is None and not trial.settings.evaluate_every:
            return taken_over(trial, experiment, folder)
        return train_run(experiment, folder, observers=[self.watcher.round])

    def document(self) -> dict[str, Any]:
        """Everything tried, the chosen values, and the results."""
        return {
            "format": FORMAT,
            "settings": plain(self.settings),
            "source": self.whole.source,
            "search": "grid" if self.random is None else "random",
            "searched": {axis.name: list(axis.values) for axis in self.axes},
            "chosen_by": "mean over clients of the accuracy on source-validation data",
            "hold_out": self.hold_out,
            "trials_per_method": len(next(iter(self.plans.values()))),
            "final_seeds": self.seeds,
            "methods": [self.method_json(one) for one in self.searched],
            "made_with": versions(),
        }

    def rows(self) -> list[MethodRow]:
        """The tests of what was chosen, a row for each method."""
        return [
            MethodRow(one.method, problem=one.problem or "it was not searched")
            if one.problem or one.chosen is None
            else method_row(one.chosen.trial.settings.method, one.outcomes, self.metric)
            for one in self.searched
        ]

    @property
    def metric(self) -> str:
        """The measure of the tests: as the settings say, or the task's own (balanced accuracy where a run found uneven classes)."""
        found = [str(made["metric"]) for one in self.searched for made in one.outcomes]
        return next((measure for measure in found if measure != "accuracy"), "accuracy")

    def as_json(self) -> dict[str, Any]:
        """The search as ``polyfed sweep --json`` prints it."""
        tests = [row_json(row) for row in self.rows()]
        found: dict[str, Any] = json_values({**self.document(), "tests": tests, "out": str(self.folder)})
        return found

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
            "trials": [score_json(score, self.folder) for score in one.scores],
            "chosen": None if one.chosen is None else score_json(one.chosen, self.folder),
            "at_the_edge": edges(one, self.axes),
            "tests": [
                {key: made[key] for key in ("seed", "method", "rounds", "accuracy", "digest", "run")} for made in one.outcomes
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
        self.data, self.settings, self.plans = data, sweep.settings, sweep.plans
        self.folder, self.watcher, self.begin, self.write = sweep.folder / "trials", sweep.watcher, sweep.begin, sweep.write

    def search(self, one: Searched) -> None:
        """Score every trial of a method and choose the best; the first of equals."""
        for values in self.plans[one.method]:
            words = f"{one.method}, {values_words(values)}"
            self.begin(words)
            try:
                score = self.score(one.method, values)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.scores.append(score)
            self.watcher.end(words, score.problem or f"validation {100 * (score.validation or 0):.1f} %")
            self.write()
        worked = [score for score in one.scores if score.validation is not None]
        if worked:
            one.chosen = max(worked, key=lambda score: score.validation or 0.0)
        else:
            one.problem = f"No setting could be trained. {one.scores[0].problem}"

    def score(self, method: str, values: Values) -> Score:
        """One trial: read back, resumed or trained. A trial whose training fails is remembered as failed."""
        experiment = Experiment(trial_settings(applied(self.settings, method, values)), self.data)
        trial = Trial(values, experiment.settings, self.folder / name_of(experiment.settings, values, self.data.source))
        for notice in experiment.notices:
            self.watcher.notice(notice)
        failure = trial.folder / "failed.json"
        if failure.exists():
            return Score(trial, None, problem=json.loads(failure.read_text())["problem"])
        try:
            result = once_free(lambda: self.trained(trial, experiment), self.watcher.notice)
        except (ClientFailure, TooFewReplies) as error:
            failure.write_text(json.dumps({"problem": str(error)}))
            return Score(trial, None, problem=str(error))
        clients = {row.client: main_value(experiment.federation.task, row) for row in result.rows}
        return Score(trial, statistics.fmean(clients.values()), clients)

    def trained(self, trial: Trial, experiment: Experiment) -> Result:
        """The trial's run, scored on validation data."""
        if (trial.folder / "run.toml").exists():
            watching = [self.watcher.round]
            return resume(trial.folder, self.data, notify=self.watcher.notice, observers=watching, split=VALIDATION)
        return train_run(experiment, RunFolder(trial.folder), observers=[self.watcher.round], split=VALIDATION)


def trial_settings(settings: Settings) -> Settings:
    """Settings of a trial: nothing of an unseen domain but its test set is set aside, and that cannot be read."""
    return dataclasses.replace(settings, unseen_part="test")


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
        folder.append([line for line in RunFolder(trial.folder).metrics() if line["view"] in ("training", SPREAD)])
        if snapshot.notes.get("best"):
            shutil.copytree(RunFolder(trial.folder).best.folder, folder.best.folder)
        return train_run(experiment, folder, resumed=True, best=snapshot.notes.get("best"))
