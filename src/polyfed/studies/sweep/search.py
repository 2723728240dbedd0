"""Search for settings on source validation data, then test the chosen ones.

The test sets cannot be read during the search. Every method has the same number of trials, or the same number of rounds if poor trials are
stopped early. Each trial is a run folder, so an interrupted search can be resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet, Federation
from polyfed.core.rounds import EVALUATION
from polyfed.errors import PolyfedError, RunFolderError, SettingError, nearest
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import Callback, Callbacks
from polyfed.runs.callbacks.progress import default_callbacks
from polyfed.runs.callbacks.training_metrics import OF_TRAINING
from polyfed.runs.experiment import Experiment, settings_given
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.checkpoint import Checkpoints
from polyfed.runs.folder.lock import retry_when_free
from polyfed.runs.folder.paths import Reopening, data_slug
from polyfed.runs.folder.run_folder import RunFolder, versions
from polyfed.runs.lifecycle import facts_of, resume, train_run
from polyfed.runs.result import Result
from polyfed.runs.scores import headline
from polyfed.runs.training_settings import VALIDATED, with_one_model
from polyfed.setting_facts import require_count
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import Candidate, candidates
from polyfed.studies.report.comparison import missing_seeds, require_pandas, row_json
from polyfed.studies.report.run_record import RunRecord
from polyfed.studies.report.run_set import MethodRow, RunSet
from polyfed.studies.report.sections import trial_rows
from polyfed.studies.report.verdict import Verdict, verdicts_of
from polyfed.studies.report.words import json_values, percent
from polyfed.studies.sweep.data import ReadTooSoon, require_validation, trial_settings, with_validation, without_tests
from polyfed.studies.sweep.proposals import SAMPLERS
from polyfed.studies.sweep.space import Axis, check_axes, trials_of_each
from polyfed.studies.sweep.trials import Searched, Searcher, Trial, edges, format_values, name_of, score_json
from polyfed.tasks.metrics import MEASURES
from polyfed.tasks.task import Headline
from polyfed.trust import code_in

FORMAT = 1
FILE = "sweep.json"


def run_sweep(
    data: Any,
    methods: Any,
    search: Mapping[str, Sequence[Any]],
    model: Any,
    out: str | Path | None,
    values: Mapping[str, Any],
    **options: Any,
) -> Sweep:
    """Implement ``polyfed.sweep``: ``values`` are settings, ``options`` are those of ``Sweep``."""
    if "method" in values:
        raise SettingError("Pass methods=[...] instead of method= to a search.")
    if model is not None and not isinstance(model, str):
        raise SettingError(
            "A search identifies trials by their settings, so the model must be a name: model='resnet20', or 'module.path:function'."
        )
    if isinstance(data, Federation):
        raise SettingError(
            "A search partitions the data itself, without the test sets, which a federation does not allow. "
            "Pass its data set (a name, a folder, a DataSet or {domain: (train, test)})."
        )
    for name, choices in search.items():
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise SettingError(f"search must map {name} to a list of values, such as [0.01, 0.1]; got {choices!r}.")
    settings = settings_given(data, model, values)
    models = [each for each in search.get("model", ()) if isinstance(each, str)]
    trust = settings.trust.adding(code for each in models for code in code_in(model=each))
    settings = dataclasses.replace(settings, trust=trust)
    sweep = Sweep(
        settings,
        methods,
        [Axis(name, tuple(choices)) for name, choices in search.items()],
        Path("runs") / f"sweep-{data_slug(settings.data)}" if out is None else out,
        data=None if isinstance(data, str | Path) else build_data_set(data, settings),
        **options,
    )
    sweep.run()
    return sweep


class Sweep:
    """A search over several methods, and the tests of the chosen settings."""

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
            settings: Settings of all runs, except for those that the search sets.
            methods: Methods, as accepted by ``candidates``.
            axes: Axes to search.
            folder: Parent of the run folders and ``sweep.json``.
            trials: Number of trials per method. None searches a grid.
            sampler: Sampler if ``trials`` is set: ``tpe`` or ``random``.
            halving: Stop poor trials after a ninth and a third of their rounds, and use the saved rounds for more trials.
            seeds: Number of final runs per method, from the seed in the settings upwards.
            hold_out: Fraction of the training data to validate on, if the data set has no validation split.
            data: Data set. Default: the one in the settings.
            callbacks: Callbacks of every trial and final run.
        """
        require_count("seeds", seeds)
        found = list(candidates(methods, settings.load, settings.trust).values())
        for one in found:
            if one.value is not None:
                raise SettingError(
                    f"A search identifies trials by their settings, so methods must be expressions, unlike {one.text!r}."
                )
        check_axes(axes, found, settings)
        if sampler not in SAMPLERS:
            raise SettingError(f"sampler cannot be {sampler!r}. {nearest(sampler, SAMPLERS)}")
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
        self.started = 0

    def run(self) -> list[Searched]:
        """Search, choose the settings, and test them."""
        for one in self.search():
            if one.chosen is not None:
                self._test(one)
            self.write()
        return self.searched

    def search(self) -> list[Searched]:
        """Search and choose the settings without reading any test set."""
        searcher = Searcher(self._search_data(), self)
        for one in self.searched:
            searcher.search(one)
            self.write()
        return self.searched

    def _search_data(self) -> DataSet:
        """Return the data of the trials, and set the primary metric by its training labels."""
        data = without_tests(self.whole)
        if self.hold_out is not None:
            data = with_validation(data, self.hold_out, self.settings.seed, self.settings.unseen)
        federation = build_federation(data, trial_settings(self.settings))
        require_validation(federation)
        self.headline = headline(self.settings.metric, federation)
        return data

    def next_run(self, label: str) -> Callbacks:
        self.started += 1
        return Callbacks(self.callbacks, label, self.started - 1, self.total)

    def _test(self, one: Searched) -> None:
        """Train and test the chosen settings once per seed."""
        assert one.chosen is not None
        for seed in self.seeds:
            label = f"{one.chosen.trial.settings.method}, {format_values(one.chosen.trial.values)}, seed {seed}, test"
            callbacks = self.next_run(label)
            try:
                result = retry_when_free(functools.partial(self.final_run, one.chosen.trial, seed, callbacks), self.message)
            except (ReadTooSoon, RunFolderError):
                raise
            except PolyfedError as error:
                one.problem = str(error)
                return
            one.outcomes.append(result.summary())
            one.records.append(RunRecord.from_result(result))
            callbacks.end_reused(result)

    def final_run(self, trial: Trial, seed: int, callbacks: Callbacks) -> Result:
        """Run the chosen settings with one seed: read, resume or train the run, or continue from its trial."""
        settings = dataclasses.replace(trial.settings, seed=seed, unseen_part=self.settings.unseen_part)
        experiment = Experiment(settings, self.whole)
        experiment.set_headline(self.headline)
        experiment.origins = {**experiment.origins, **dict.fromkeys(self.tuned, VALIDATED)}
        # If the run folder holds the name of the data set, polyfed resume can rebuild it.
        experiment.given = [] if self.data_by_name else ["data"]
        folder = RunFolder(self.folder / "final" / name_of(experiment.settings, {}, self.whole.source, self.chosen_by(settings)))
        if (folder.path / "run.toml").exists():
            return resume(folder.path, self.whole, Reopening(trusted=settings.trust), [callbacks])
        if seed == trial.settings.seed and self.hold_out is None and not trial.settings.evaluate_every:
            return _continue_trial(trial, experiment, folder)
        return train_run(experiment, folder, [callbacks])

    def document(self) -> dict[str, Any]:
        """Return all trials, the chosen values and the test results, as stored in ``sweep.json``."""
        return {
            "format": FORMAT,
            "settings": self.settings.to_dict(),
            "source": self.whole.source,
            "search": "grid" if self.is_grid else self.sampler,
            "halving": self.halving,
            "searched": {axis.name: list(axis.values) for axis in self.axes},
            "metric": self.metric,
            "metric_reason": self.metric_reason,
            "chosen_by": f"mean over clients of the {MEASURES[self.metric]} on source-validation data",
            "hold_out": self.hold_out,
            "trials_per_method": self.trials,
            "final_seeds": self.seeds,
            "methods": [self._method_json(one) for one in self.searched],
            "made_with": versions(),
        }

    def rows(self) -> list[MethodRow]:
        """Return the test results of the chosen settings, one row per method."""
        return [self._row(one) for one in self.searched]

    def _row(self, one: Searched) -> MethodRow:
        if one.chosen is None or not one.records:
            return MethodRow(one.method, problem=one.problem or "not searched yet", own=one.candidate.own)
        done = {run.seed for run in one.records}
        failed = next((seed for seed in self.seeds if seed not in done), 0)
        missing = missing_seeds(self.seeds, done, failed, one.problem)
        label = Candidate(one.chosen.trial.settings.method, one.own).label
        return MethodRow(label, one.records, self.metric, one.own, missing=missing)

    @property
    def tests(self) -> RunSet:
        return RunSet(self.rows())

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdict on the test results of each view, as in the report; empty for a single method."""
        return verdicts_of(self.tests) if len(self.searched) > 1 else []

    @property
    def significance(self) -> str:
        """The verdicts as text, as in ``Comparison.significance``."""
        return " ".join(verdict.text for verdict in self.verdicts)

    @property
    def tuned(self) -> list[str]:
        """The settings that the search chooses between several values."""
        return [axis.name for axis in self.axes if not axis.part and len(set(axis.values)) > 1 and self.trials > 1]

    @property
    def metric_reason(self) -> str:
        return "" if self.headline is None else self.headline.reason

    @property
    def metric(self) -> str:
        """The primary metric for choosing and testing: the requested one, or chosen from the training labels before the first trial."""
        return self.whole.task.main_measure if self.headline is None else self.headline.measure

    def chosen_by(self, settings: Settings, stoppable: bool = False) -> str:
        """Return the metric for the run's name, or "" if it does not affect the run or is the task's default."""
        decides = stoppable or settings.needs_validation
        return self.metric if decides and self.metric != self.whole.task.main_measure else ""

    def as_json(self) -> dict[str, Any]:
        """Return the search as ``polyfed sweep --json`` prints it."""
        tests = [row_json(row) for row in self.rows()]
        verdicts = [verdict.as_json() for verdict in self.verdicts]
        shown = {"tests": tests, "significance": self.significance, "verdicts": verdicts, "out": str(self.folder)}
        found: dict[str, Any] = json_values({**self.document(), **shown})
        return found

    def table(self) -> Any:
        """Return all trials as a pandas frame: method, values, validation score (a fraction), and whether they were chosen.

        The columns are named after the metric of the scores.
        """
        pandas = require_pandas("table()")
        frame = pandas.DataFrame(
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
        frame.columns.name = self.metric
        return frame

    def _repr_html_(self) -> str:
        axes = [axis.name for axis in self.axes]
        header = "".join(f"<th>{escape(name)}</th>" for name in ("method", *axes, "validation, %", ""))
        body = ""
        for row in (row for one in self.document()["methods"] for row in trial_rows(one, axes)):
            cells = (row["method"], *row["tried"], row["validation"], "chosen" if row["chosen"] else "")
            body += "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"
        first, *tests = repr(self).split("\n")
        results = "".join(f"<p>{escape(line)}</p>" for line in tests)
        return f"<table><caption>{escape(first)}</caption><tr>{header}</tr>{body}</table>{results}"

    def __repr__(self) -> str:
        axes = ", ".join(axis.name for axis in self.axes)
        lines = [f"search of {axes} on {self.settings.data}, chosen by {MEASURES[self.metric]}, {FILE} in {self.folder}"]
        for one, row in zip(self.searched, self.rows(), strict=True):
            if one.chosen is None or row.mean is None:
                lines.append(f"{one.method}: {row.problem}")
            else:
                values = format_values(one.chosen.trial.values)
                mean = percent(row.mean.value, row.mean.error)
                lines.append(f"{one.method}: {values}, test mean {mean} %{f'. {row.note}' if row.note else ''}")
        return "\n".join(lines)

    def _method_json(self, one: Searched) -> dict[str, Any]:
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / FILE, json.dumps(self.document(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise RunFolderError(f"Cannot write to {self.folder}: {error.strerror or error}. Choose another --out.") from error


def _continue_trial(trial: Trial, experiment: Experiment, folder: RunFolder) -> Result:
    """Copy a finished trial to a new run folder and test it; training again would be bit-identical."""
    snapshot, _ = RunFolder(trial.folder).read()
    if snapshot is None:
        return train_run(experiment, folder)
    initial = experiment.snapshot()
    experiment.restore(snapshot)
    # The cost of validation belongs to the search, not to this run.
    costs = experiment.costs
    for direction in costs.bytes.values():
        direction.pop(EVALUATION, None)
    costs.messages.pop(EVALUATION, None)
    costs.seconds.pop("evaluation", None)
    with folder.locked():
        folder.create(experiment.settings, facts_of(experiment))
        # If this is interrupted, the run starts at round 0; metrics without a checkpoint would count as damaged.
        initial.notes |= {"metrics_size": 0, "finished": False, "best": None}
        Checkpoints(folder.checkpoints.folder).write(initial, set(initial.clients))
        folder.append([line for line in RunFolder(trial.folder).metrics() if line["view"] in OF_TRAINING])
        if snapshot.notes.get("best"):
            shutil.copytree(RunFolder(trial.folder).best.folder, folder.best.folder)
        return train_run(experiment, folder, resumed=True, best=snapshot.notes.get("best"))
