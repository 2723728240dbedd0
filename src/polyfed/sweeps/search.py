"""A search for settings, chosen on source-validation data; only then is anything tested.

The search gets a data set whose test sets cannot be read, so no choice can depend on them. Every method has the same number
of trials. Each trial is a run folder: a search that was stopped goes on, and finished trials are read back.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.build import build_data_set, build_federation
from polyfed.conversation import EVALUATION
from polyfed.data.federation import DataSet
from polyfed.errors import ClientFailure, PolyfedError, RunFolderError, TooFewReplies
from polyfed.experiment import Experiment
from polyfed.folder import RunFolder, plain, versions
from polyfed.observers import facts_of, record, resume
from polyfed.report.tables import outcome
from polyfed.result import Result
from polyfed.settings import Settings
from polyfed.sweeps.data import ReadTooSoon, need_validation, with_validation, without_tests
from polyfed.sweeps.space import Axis, Values, applied, check_axes, planned
from polyfed.sweeps.trials import Score, Searched, Trial, edges, name_of, said, score_told

if TYPE_CHECKING:
    from polyfed.server import Server

FORMAT = 1
FILE = "sweep.json"
VALIDATION = "validation"


class Watch:
    """Is told what goes on; by default it says nothing."""

    def begin(self, words: str, number: int, total: int) -> None:
        """A trial or a final run begins."""

    def round(self, server: Server) -> None:
        """A round is over."""

    def end(self, words: str, said: str) -> None:
        """It is over."""

    def notice(self, text: str) -> None:
        """Something a user should know."""


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
        watch: Watch | None = None,
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
            watch: is told what goes on.
        """
        check_axes(axes, methods, settings)
        self.settings, self.axes, self.folder, self.random = settings, list(axes), Path(folder), random
        self.seeds = [settings.seed + step for step in range(seeds)]
        self.hold_out, self.watch = hold_out, watch or Watch()
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
        """Tell that a run begins."""
        self.begun += 1
        self.watch.begin(words, self.begun, self.total)

    def test(self, one: Searched) -> None:
        """Train the chosen setting once per seed, and test it."""
        assert one.chosen is not None
        for seed in self.seeds:
            words = f"{one.chosen.trial.settings.method}, {said(one.chosen.trial.values)}, seed {seed}, test"
            self.begin(words)
            try:
                result = self.final(one.chosen.trial, seed)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.outcomes.append(outcome(result))
            self.watch.end(words, f"mean {100 * result.accuracy['mean']:.1f} %")

    def final(self, trial: Trial, seed: int) -> Result:
        """The chosen setting with one seed: read, resumed, taken over from its trial, or trained."""
        settings = dataclasses.replace(trial.settings, seed=seed, unseen_part=self.settings.unseen_part)
        experiment = Experiment(settings, self.whole)
        if self.data_by_name:
            # The run folder holds the name, so polyfed resume can build the data again.
            experiment.given = []
        folder = RunFolder(self.folder / "final" / name_of(experiment.settings, {}, self.whole.source))
        if (folder.path / "run.toml").exists():
            return resume(folder.path, self.whole, notify=self.watch.notice, observers=[self.watch.round])
        if seed == trial.settings.seed and self.hold_out is None and not trial.settings.evaluate_every:
            return taken_over(trial, experiment, folder)
        return record(experiment, folder, observers=[self.watch.round])

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
            "methods": [self.told(one) for one in self.searched],
            "made_with": versions(),
        }

    def told(self, one: Searched) -> dict[str, Any]:
        """One method as JSON."""
        return {
            "method": one.method,
            "trials": [score_told(score, self.folder) for score in one.scores],
            "chosen": None if one.chosen is None else score_told(one.chosen, self.folder),
            "at_the_edge": edges(one, self.axes),
            "tests": [
                {key: made[key] for key in ("seed", "method", "rounds", "accuracy", "digest", "run")} for made in one.outcomes
            ],
            "problem": one.problem or None,
        }

    def write(self) -> None:
        """Write sweep.json beside, and rename it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f"{FILE}.part"
            beside.write_text(json.dumps(self.document(), indent=1, allow_nan=False) + "\n")
            beside.replace(self.folder / FILE)
        except OSError as error:
            raise RunFolderError(f"Cannot write to {self.folder}: {error.strerror or error}. Choose another --out.") from error


class Searcher:
    """Trains and validates trials, on data whose tests cannot be read."""

    def __init__(self, data: DataSet, sweep: Sweep) -> None:
        self.data, self.settings, self.plans = data, sweep.settings, sweep.plans
        self.folder, self.watch, self.begin, self.write = sweep.folder / "trials", sweep.watch, sweep.begin, sweep.write

    def search(self, one: Searched) -> None:
        """Score every trial of a method and choose the best; the first of equals."""
        for values in self.plans[one.method]:
            words = f"{one.method}, {said(values)}"
            self.begin(words)
            try:
                score = self.score(one.method, values)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.scores.append(score)
            self.watch.end(words, score.problem or f"validation {100 * (score.validation or 0):.1f} %")
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
            self.watch.notice(notice)
        failure = trial.folder / "failed.json"
        if failure.exists():
            return Score(trial, None, problem=json.loads(failure.read_text())["problem"])
        try:
            result = self.trained(trial, experiment)
        except (ClientFailure, TooFewReplies) as error:
            failure.write_text(json.dumps({"problem": str(error)}))
            return Score(trial, None, problem=str(error))
        clients = {row.client: float(row.numbers["accuracy"]) for row in result.rows}
        return Score(trial, statistics.fmean(clients.values()), clients)

    def trained(self, trial: Trial, experiment: Experiment) -> Result:
        """The trial's run, scored on validation data."""
        if (trial.folder / "run.toml").exists():
            watching = [self.watch.round]
            return resume(trial.folder, self.data, notify=self.watch.notice, observers=watching, split=VALIDATION)
        return record(experiment, RunFolder(trial.folder), observers=[self.watch.round], split=VALIDATION)


def trial_settings(settings: Settings) -> Settings:
    """Settings of a trial: nothing of an unseen domain but its test set is set aside, and that cannot be read."""
    return dataclasses.replace(settings, unseen_part="test")


def taken_over(trial: Trial, experiment: Experiment, folder: RunFolder) -> Result:
    """The end of a trial as a run of its own, tested: training it again would give the same bits."""
    snapshot, _ = RunFolder(trial.folder).checkpoints.read()
    if snapshot is None:
        return record(experiment, folder)
    experiment.restore(snapshot)
    # What validation cost belongs to the search, not to this run.
    ledger = experiment.ledger
    for direction in ledger.bytes.values():
        direction.pop(EVALUATION, None)
    ledger.messages.pop(EVALUATION, None)
    ledger.seconds.pop("evaluation", None)
    with folder.held():
        folder.create(experiment.settings, facts_of(experiment))
        folder.append([line for line in RunFolder(trial.folder).metrics() if line["view"] == "training"])
        if snapshot.notes.get("best"):
            shutil.copytree(RunFolder(trial.folder).best.folder, folder.best.folder)
        return record(experiment, folder, resumed=True, best=snapshot.notes.get("best"))
