"""Plan the runs of a comparison, reuse the finished ones and train the others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from polyfed.backends.in_process import InProcess
from polyfed.core.data_types import DataSet, Federation
from polyfed.core.method import Method
from polyfed.data.federation_summary import FederationSummary
from polyfed.errors import NotFinite, PolyfedError, SettingError, nearest
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import Callback, Callbacks
from polyfed.runs.callbacks.progress import default_callbacks
from polyfed.runs.experiment import Experiment, reject_partition_settings, settings_given
from polyfed.runs.folder.divergence import Divergence
from polyfed.runs.folder.lock import RunIsBusy, is_held, retry_when_free
from polyfed.runs.folder.paths import Reopening, anchored, slug
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import callbacks_for, resume, train_run
from polyfed.runs.result import Result
from polyfed.runs.scores import headline, recorded_headline
from polyfed.runs.training_settings import why_this_model, with_declared, with_one_model
from polyfed.setting_facts import require_count
from polyfed.settings import AUTO, Settings
from polyfed.studies.compare.candidates import Candidate, candidates
from polyfed.tasks.task import Headline

SEEN, LEAVE_ONE_OUT = PROTOCOLS = ("seen", "leave-one-out")
LEAVE_ONE_OUT_DEFAULTS: Mapping[str, Any] = {"unseen_part": "all"}
"""No client trains on the unseen domain, so all its images can be tested, as in the papers."""
_NOT_COMPARED: Mapping[str, Any] = {"checkpoint_every": "60s", "workers": "1", "metric": AUTO}
"""Settings that do not affect results."""
_SECONDS_TO_START = 30.0

Read = TypeVar("Read")


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison.

    ``method`` is a label: the method expression with the per-method settings. ``value`` is the method itself, if the expression does not
    define it. ``left_out`` is the unseen domain with the leave-one-out protocol.
    """

    method: str
    seed: int
    left_out: str | None
    settings: Settings
    value: Method | None = None

    @property
    def name(self) -> str:
        return f"{slug(self.method)}-seed{self.seed}" + (f"-without-{slug(self.left_out)}" if self.left_out else "")

    @property
    def words(self) -> str:
        return f"{self.method}, seed {self.seed}" + (f", without {self.left_out}" if self.left_out else "")


class ComparedRuns:
    """All runs of a comparison, on data that is built once."""

    def __init__(
        self,
        settings: Settings,
        methods: Any,
        *,
        data: Any = None,
        model: Any = None,
        seeds: int = 1,
        protocol: str = SEEN,
        folder: str | Path | None = None,
        callbacks: Sequence[Callback] | None = None,
        track: str | Sequence[str] = (),
    ) -> None:
        """Plan the runs.

        Args:
            settings: Settings of all runs, except for the method, the per-method settings, the seed and the unseen domain.
            methods: Methods, as accepted by ``candidates``.
            data: As for ``polyfed.run``. Default: the data set in the settings.
            model: A module, or a function that builds one. Default: the model in the settings.
            seeds: Number of runs per method, from the seed in the settings upwards.
            protocol: ``seen``, or ``leave-one-out``, which runs every method once per unseen domain.
            folder: Parent of the run folders, including finished ones to reuse. None writes nothing.
            callbacks: Callbacks of every run. Default: a progress bar in a notebook.
            track: Trackers of every run: tensorboard, mlflow, wandb.
        """
        callbacks_for(track)
        self.track = track
        require_count("seeds", seeds)
        if protocol not in PROTOCOLS:
            raise SettingError(f"protocol cannot be {protocol!r}. {nearest(protocol, PROTOCOLS)}")
        if protocol == LEAVE_ONE_OUT and settings.unseen:
            raise SettingError("The leave-one-out protocol sets the unseen domains. Remove unseen.")
        self.settings, self.protocol = settings, protocol
        self.callbacks = default_callbacks(callbacks)
        self.message = Callbacks(self.callbacks).message
        self.folder = None if folder is None else Path(folder)
        self.model = None if isinstance(model, str) else model
        self.seeds = tuple(range(settings.seed, settings.seed + seeds))
        self.methods = candidates(methods, settings.load, settings.trust)
        self.given = [] if data is None or isinstance(data, str | Path) else ["data"]
        self.data = _data_for(settings.data if data is None else data, settings, protocol)
        if model is None:
            self.settings = with_one_model(settings, self.data.default_model, [one.method for one in self.methods.values()])
            with_batch_norm = [label for label, one in self.methods.items() if one.method.facts.batch_norm]
            for notice in why_this_model(settings, self.settings, self.data, " and ".join(with_batch_norm)):
                self.message(f"{notice} All methods use it.")
        self.undeclared = self.settings
        self.settings, self.origins = with_declared(self.settings, self.data, self.model)
        left_out = [domain.name for domain in self.data.domains] if isinstance(self.data, DataSet) else []
        self.runs = self._plan(left_out if protocol == LEAVE_ONE_OUT else [None])
        self.problems: dict[str, str] = {}
        self.failed: dict[str, int] = {}
        self.divergences: dict[str, Divergence] = {}
        self.reused = 0

    @cached_property
    def headline(self) -> Headline:
        """The primary metric of all runs and the table: the requested one, or chosen from the training labels of all domains."""
        whole = dataclasses.replace(self.settings, unseen=()) if self.protocol == LEAVE_ONE_OUT else self.settings
        return headline(self.settings.metric, build_federation(self.data, whole))

    @property
    def model_name(self) -> str:
        """Name of the model that all runs use."""
        if self.model is not None:
            return getattr(self.model, "__name__", type(self.model).__name__)
        return self.settings.model or self.data.default_model

    def _plan(self, left_out: Sequence[str | None]) -> list[ComparisonRun]:
        runs = []
        for label, one in self.methods.items():
            for seed, domain in itertools.product(self.seeds, left_out):
                unseen = self.settings.unseen if domain is None else (domain,)
                settings = dataclasses.replace(self._settings_of(one)[0], seed=seed, unseen=unseen)
                runs.append(ComparisonRun(label, seed, domain, settings, one.value))
        return runs

    def _settings_of(self, one: Candidate) -> tuple[Settings, dict[str, str]]:
        """Return a method's settings and their origins. Declared learning rates do not apply to a per-method optimizer."""
        return with_declared(one.settings(self.undeclared), self.data, self.model)

    def train(self, read: Callable[[Result], Read]) -> list[tuple[ComparisonRun, Read]]:
        """Train, resume or reuse every run.

        If a run fails, the rest of its method is skipped; ``problems`` and ``failed`` have the reason and the seed.

        Args:
            read: Extracts what is needed from a finished run, so that its models can be freed.
        """
        self.problems, self.divergences, self.reused = self._find_unbuildable(), {}, 0
        found: dict[str, Read] = {}
        finished = 0

        def attempt(run: ComparisonRun, wait: bool) -> bool:
            """Run once; return False if another process is training the run and ``wait`` is False."""
            nonlocal finished
            if run.method not in self.problems:
                callbacks = Callbacks(self.callbacks, run.words, finished, len(self.runs))
                try:
                    train = functools.partial(self._train_one, run, read, callbacks)
                    found[run.words] = retry_when_free(train, self.message) if wait else train()
                except PolyfedError as error:
                    if isinstance(error, RunIsBusy) and error.elsewhere:
                        return False
                    self.problems[run.method], self.failed[run.method] = str(error), run.seed
                    if isinstance(error, NotFinite):
                        self.divergences[run.method] = Divergence(error.round, error.client, run.settings.lower_lr)
                    self.message(f"{run.method} failed: {error}")
            finished += 1
            return True

        # Runs that another process is training come last, so two processes can share the same comparison.
        for run in [run for run in self.runs if not attempt(run, wait=False)]:
            attempt(run, wait=True)
        return [(run, found[run.words]) for run in self.runs if run.words in found]

    def _find_unbuildable(self) -> dict[str, str]:
        """Return the methods that cannot be built, with the reasons, before the others train for hours."""
        problems: dict[str, str] = {}
        for method in self.methods:
            run = next(run for run in self.runs if run.method == method)
            try:
                Experiment(run.settings, self.data, run.value, self.model, backend=InProcess)
            except PolyfedError as error:
                problems[method] = str(error)
                self.message(f"Skipping {method}: {error}")
        return problems

    def _train_one(self, run: ComparisonRun, read: Callable[[Result], Read], run_callbacks: Callbacks) -> Read:
        experiment = Experiment(run.settings, self.data, run.value, self.model)
        experiment.set_headline(self.headline)
        objects = {"method": run.value, "model": self.model}
        experiment.given = [*self.given, *(name for name, value in objects.items() if value is not None)]
        for notice in experiment.notices:
            self.message(notice)
        experiment.origins = self._settings_of(self.methods[run.method])[1]
        folder, exists = self.folder_of(run, experiment)
        callbacks = [run_callbacks, *callbacks_for(self.track)]
        if folder is not None and exists:
            result = resume(folder.path, self.data, Reopening(trusted=run.settings.trust), callbacks)
        else:
            result = train_run(experiment, folder, callbacks)
        self.reused += exists and not run_callbacks.trained
        run_callbacks.end_reused(result)
        return read(result)

    def folder_of(self, run: ComparisonRun, experiment: Experiment) -> tuple[RunFolder | None, bool]:
        """Return the run folder and whether it already holds this run; skip folders of other runs."""
        number = 1
        while self.folder is not None:
            folder = RunFolder(self.folder / (run.name if number == 1 else f"{run.name}-{number}"))
            if not folder.path.exists():
                return folder, False
            _wait_for_start(folder.path)
            if (folder.path / "run.toml").is_file() and holds_run(folder, experiment):
                return folder, True
            number += 1
        return None, False


def _wait_for_start(folder: Path) -> None:
    """Wait until another process that has just created this folder writes its run.toml."""
    end = time.monotonic() + _SECONDS_TO_START
    while not (folder / "run.toml").exists() and is_held(folder) and time.monotonic() < end:
        time.sleep(0.02)


def settings_for(data: Any, model: Any, protocol: str, values: Mapping[str, Any]) -> Settings:
    """Return the settings of a comparison that is started from Python."""
    if "method" in values:
        raise SettingError("Pass methods=[...] instead of method= to a comparison.")
    return settings_given(data, model, {**(LEAVE_ONE_OUT_DEFAULTS if protocol == LEAVE_ONE_OUT else {}), **values})


def _data_for(data: Any, settings: Settings, protocol: str) -> DataSet | Federation:
    if not isinstance(data, Federation):
        return build_data_set(data, settings)
    if protocol == LEAVE_ONE_OUT:
        raise SettingError(
            "The leave-one-out protocol partitions the data again for every unseen domain, which a federation does not allow. "
            "Pass its data set (a name, a folder, a DataSet or {domain: (train, test)}), or use the seen protocol."
        )
    reject_partition_settings(settings)
    return data


def holds_run(folder: RunFolder, experiment: Experiment) -> bool:
    """Return True if a folder holds the run of an experiment: the same settings, data and method options.

    The options are compared because a default may have changed, and the metric if it selected the round. Methods and models passed as
    Python values cannot be compared, so the result is False for them.
    """
    if {"method", "model"} & {*experiment.given, *folder.document().get("given_in_python", ())}:
        return False
    settings = (folder.settings(), anchored(experiment.settings, experiment.given))
    one, other = (dataclasses.replace(each, **_NOT_COMPARED) for each in settings)
    if experiment.settings.needs_validation:
        found = recorded_headline(folder.document())
        chosen_by = experiment.federation.task.main_measure if found is None else found.measure
        if chosen_by != experiment.bench.measure:
            return False
    same_options = folder.document().get("method", {}).get("all_options") == experiment.method.full_text
    return one == other and same_options and not folder.other_data(FederationSummary.of(experiment.federation).identity())
