"""The runs of a comparison: which there are, which are finished already, and training what is missing.

Several methods, each over several seeds, with everything else equal. Under the protocol ``leave-one-out`` each of these is one run
per domain, which nobody trains on in that run. ``studies/report/comparison.py`` makes a table of the outcomes.
"""

from __future__ import annotations

import dataclasses
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
from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import Callback, Callbacks
from polyfed.runs.callbacks.progress import default_callbacks
from polyfed.runs.experiment import Experiment, reject_partition_settings, settings_given
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
"""Nobody trains on the domain that is left out, so all its images can be tested, as the papers do."""
_NOT_COMPARED: Mapping[str, Any] = {"checkpoint_every": "60s", "workers": "1", "metric": AUTO}
"""Settings that change nothing in a result."""
_SECONDS_TO_START = 30.0

Read = TypeVar("Read")


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison.

    Attributes:
        method: the method's text, with the settings of its own.
        seed: the seed.
        left_out: the domain that is unseen in this run of a leave-one-out comparison.
        settings: all its settings.
        value: the method itself, where its text does not say it all.
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
    """All runs of a comparison, on data that are made once."""

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
        """Decide which runs there are; what cannot be run at all is refused here.

        Args:
            settings: of every run, but for its method with the settings of its own, its seed and the domain it leaves out.
            methods: as ``studies/compare/candidates.py`` reads them.
            data: as for ``polyfed.run``; default: what the settings name.
            model: a module or a function that builds one; default: what the settings name.
            seeds: runs of each method: the settings' seed, and the next ones.
            protocol: ``seen``, or ``leave-one-out``: every domain unseen in turn.
            folder: where run folders go, and where finished ones are looked for; None: nothing is written.
            callbacks: Called for every run; default: a progress bar in a notebook.
            track: trackers that every run is written to: tensorboard, mlflow, wandb.
        """
        callbacks_for(track)
        self.track = track
        _check_protocol(settings, seeds, protocol)
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
            needing = [label for label, one in self.methods.items() if one.method.facts.batch_norm]
            for notice in why_this_model(settings, self.settings, self.data, " and ".join(needing)):
                self.message(f"{notice} It is the same for all methods.")
        self.undeclared = self.settings
        self.settings, self.origins = with_declared(self.settings, self.data, self.model)
        left_out = [domain.name for domain in self.data.domains] if isinstance(self.data, DataSet) else []
        self.runs = self._planned(left_out if protocol == LEAVE_ONE_OUT else [None])
        self.problems: dict[str, str] = {}
        self.reused = 0

    @cached_property
    def headline(self) -> Headline:
        """The metric of all its runs and of their table: the requested one, or chosen from the training labels of all domains."""
        whole = dataclasses.replace(self.settings, unseen=()) if self.protocol == LEAVE_ONE_OUT else self.settings
        return headline(self.settings.metric, build_federation(self.data, whole))

    @property
    def model_words(self) -> str:
        """The one model of all runs, by its text or by the name of what was given in Python."""
        if self.model is not None:
            return getattr(self.model, "__name__", type(self.model).__name__)
        return self.settings.model or self.data.default_model

    def _planned(self, left_out: Sequence[str | None]) -> list[ComparisonRun]:
        settings = self.settings
        return [
            ComparisonRun(
                label,
                seed,
                domain,
                dataclasses.replace(self._chosen(one)[0], seed=seed, unseen=settings.unseen if domain is None else (domain,)),
                one.value,
            )
            for label, one in self.methods.items()
            for seed in self.seeds
            for domain in left_out
        ]

    def _chosen(self, one: Candidate) -> tuple[Settings, dict[str, str]]:
        """The settings of a method and their origins: a rate that is declared does not go with an optimizer of the method's own."""
        return with_declared(one.settings(self.undeclared), self.data, self.model)

    def train(self, read: Callable[[Result], Read]) -> list[tuple[ComparisonRun, Read]]:
        """Train, resume or read back every run. A method that fails is given up and named in ``problems``; the others go on.

        Args:
            read: takes from a finished run what is needed of it, so that its models need not stay in memory.
        """
        self.problems, self.reused = self.unfit(), 0
        found: dict[str, Read] = {}
        settled = 0

        def attempt(run: ComparisonRun, patient: bool) -> bool:
            """Try to finish a run; says whether it is settled. One that another process trains is waited for only by the patient."""
            nonlocal settled
            if run.method not in self.problems:
                heard_by = Callbacks(self.callbacks, run.words, settled, len(self.runs))
                try:
                    found[run.words] = (
                        retry_when_free(lambda: self._train_one(run, read, heard_by), self.message)
                        if patient
                        else self._train_one(run, read, heard_by)
                    )
                except PolyfedError as error:
                    if isinstance(error, RunIsBusy) and error.elsewhere:
                        return False
                    self.problems[run.method] = str(error)
                    self.message(f"{run.method} is given up: {error}")
            settled += 1
            return True

        # Runs that another process trains just now come last, so the same comparison, begun twice, shares its work.
        for run in [run for run in self.runs if not attempt(run, patient=False)]:
            attempt(run, patient=True)
        return [(run, found[run.words]) for run in self.runs if run.words in found]

    def unfit(self) -> dict[str, str]:
        """Methods that cannot be built here, and why; found before the others train, which may take hours."""
        problems: dict[str, str] = {}
        for method in self.methods:
            run = next(run for run in self.runs if run.method == method)
            try:
                Experiment(run.settings, self.data, run.value, self.model, backend=InProcess)
            except PolyfedError as error:
                problems[method] = str(error)
                self.message(f"{method} will be left out: {error}")
        return problems

    def _train_one(self, run: ComparisonRun, read: Callable[[Result], Read], heard_by: Callbacks) -> Read:
        experiment = Experiment(run.settings, self.data, run.value, self.model)
        experiment.set_headline(self.headline)
        objects = {"method": run.value, "model": self.model}
        experiment.given = [*self.given, *(name for name, value in objects.items() if value is not None)]
        for notice in experiment.notices:
            self.message(notice)
        experiment.origins = self._chosen(self.methods[run.method])[1]
        folder, exists = self.folder_of(run, experiment)
        callbacks = [heard_by, *callbacks_for(self.track)]
        if folder is not None and exists:
            result = resume(folder.path, self.data, Reopening(trusted=run.settings.trust), callbacks)
        else:
            result = train_run(experiment, folder, callbacks)
        self.reused += exists and not heard_by.trained
        heard_by.end_reused(result)
        return read(result)

    def folder_of(self, run: ComparisonRun, experiment: Experiment) -> tuple[RunFolder | None, bool]:
        """The folder of a run, and whether it holds this run already; folders of other runs are passed over."""
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
    """Another process that has just made a folder says in a moment which run is in it."""
    end = time.monotonic() + _SECONDS_TO_START
    while not (folder / "run.toml").exists() and is_held(folder) and time.monotonic() < end:
        time.sleep(0.02)


def _check_protocol(settings: Settings, seeds: int, protocol: str) -> None:
    """Refuse a number of seeds or a protocol that cannot be followed."""
    require_count("seeds", seeds)
    if protocol not in PROTOCOLS:
        raise SettingError(f"protocol cannot be {protocol!r}. {nearest(protocol, PROTOCOLS)}")
    if protocol == LEAVE_ONE_OUT and settings.unseen:
        raise SettingError("protocol leave-one-out chooses the unseen domains itself; leave unseen out.")


def settings_for(data: Any, model: Any, protocol: str, values: Mapping[str, Any]) -> Settings:
    """The settings of a comparison that is begun in Python."""
    if "method" in values:
        raise SettingError("A comparison takes methods=[...], not method=.")
    return settings_given(data, model, {**(LEAVE_ONE_OUT_DEFAULTS if protocol == LEAVE_ONE_OUT else {}), **values})


def _data_for(data: Any, settings: Settings, protocol: str) -> DataSet | Federation:
    """The data of all runs; a federation that was made already can be compared on, but leaves no domain out."""
    if not isinstance(data, Federation):
        return build_data_set(data, settings)
    if protocol == LEAVE_ONE_OUT:
        raise SettingError(
            "protocol leave-one-out deals the data to clients once for every domain, and a federation is dealt already. "
            "Give the data set it was made from (a name, a folder, a DataSet or {domain: (train, test)}), or use protocol seen."
        )
    reject_partition_settings(settings)
    return data


def holds_run(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether a folder holds the run of an experiment: its settings, its data, and its method with the same options.

    Options count since a default may have changed, and so does the metric if it chose the round. A method or model that is a value of Python cannot be compared, so such a run is
    never taken for another.
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
