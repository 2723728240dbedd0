"""Train, finish and resume a run. A run with a folder survives being killed at any time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.backends.choose import BackendFor, backend_for
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.data.federation_summary import FederationSummary
from polyfed.errors import NotFinite, RunFolderError
from polyfed.runs.callbacks.callback import ActiveRun, Callback, Callbacks, StoppedEarly
from polyfed.runs.callbacks.checkpoints import CheckpointWriter
from polyfed.runs.callbacks.evaluation import SELECTIONS, EarlyStopping, Evaluation
from polyfed.runs.callbacks.training_metrics import TrainingMetrics
from polyfed.runs.costs import Meter
from polyfed.runs.experiment import Experiment, settings_given
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.divergence import Divergence
from polyfed.runs.folder.final_files import read_answers, save_newcomer
from polyfed.runs.folder.manifest import manifest_files
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.result import Result
from polyfed.runs.scores import headline_table, recorded_headline, rows_at, scored_rounds
from polyfed.runs.training_settings import OBJECT_SETTINGS, split_objects, use_objects
from polyfed.settings import Settings

log = logging.getLogger("polyfed")

UNCHANGED = Reopening()


def run_experiment(
    data: Any,
    method: str | Method | None,
    model: str | nn.Module | Callable[..., nn.Module] | None,
    out: str | Path | Callable[[Settings], Path] | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str] = (),
    **values: Any,
) -> Result:
    """Do what ``polyfed.run`` documents; ``out`` may be a function that returns the folder for the resolved settings."""
    from polyfed.runs.callbacks.progress import ProgressBar

    plain, objects = split_objects(values)
    if isinstance(out, str | Path):
        RunFolder(out).refuse_to_overwrite()
    trackers = callbacks_for(track)
    experiment = Experiment(settings_given(data, model, plain), data, method, model)
    given = {"data": data, "method": method, "model": model}
    experiment.given = [name for name, value in given.items() if value is not None and not isinstance(value, str | Path)]
    use_objects(experiment, objects)
    folder = out(experiment.settings) if callable(out) else out
    for notice in experiment.notices:
        Callbacks(callbacks).message(notice)
    with ProgressBar(progress) as bar:
        return train_run(experiment, None if folder is None else RunFolder(folder), [*callbacks, *trackers, bar])


def callbacks_for(track: str | Sequence[str]) -> list[Callback]:
    from polyfed.runs.callbacks.trackers import trackers

    return trackers(track) if track else []


def train_run(
    experiment: Experiment,
    folder: RunFolder | None = None,
    callbacks: Sequence[Callback] = (),
    split: str = "test",
    resumed: bool = False,
    best: Mapping[str, Any] | None = None,
) -> Result:
    """Train the remaining rounds and score the final model. The last checkpoint stays valid if training fails.

    Args:
        experiment: The experiment to train.
        folder: Run folder for metrics and checkpoints; None writes no files.
        callbacks: Called after those of the run.
        split: Data to score: test or validation.
        resumed: The folder already contains this run.
        best: Checkpoint notes about the best round so far, for a resumed run.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(folder.locked())
            experiment.backend.keep_in(folder.path)
            if not resumed:
                folder.create(experiment.settings, facts_of(experiment))
        stack.callback(experiment.backend.close)
        run = ActiveRun(experiment, folder, split, resumed)
        settings = experiment.settings
        selection = SELECTIONS[settings.selection](run, best) if settings.needs_validation else None
        stopping = EarlyStopping(run, *settings.patience) if settings.patience else None
        evaluation, checkpoints = Evaluation(run, selection), CheckpointWriter(run, selection)
        # Checkpoints record the size of the metrics, so they come after all callbacks that write metrics.
        internal = [TrainingMetrics(run), selection, evaluation, stopping, checkpoints]
        run.callbacks = [*(callback for callback in internal if callback is not None), *callbacks]
        try:
            run.begin()
            experiment.train([_after_round(run, checkpoints)])
        except StoppedEarly as stop:
            log.info("%s", stop)
        except BaseException as error:
            checkpoints.save_if_between_rounds()
            _record_divergence(run, error)
            raise
        try:
            result = Result(experiment, evaluation.final_rows(), run.path, run.answers, run.by_round)
            for callback in run.callbacks:
                callback.end(result)
        except BaseException as error:
            checkpoints.settle()
            _record_divergence(run, error)
            raise
        return result


def _record_divergence(run: ActiveRun, error: BaseException) -> None:
    """Record that a run diverged. Metrics without a checkpoint look like data loss, so nothing is recorded before the first one."""
    if not isinstance(error, NotFinite) or run.folder is None or not manifest_files(run.folder.checkpoints.folder):
        return
    number = error.round or run.experiment.server.round
    try:
        run.write([Divergence(number, error.client, run.experiment.settings.lower_lr).as_line()])
    except RunFolderError as problem:
        log.warning("%s", problem)


def _after_round(run: ActiveRun, checkpoints: CheckpointWriter) -> Callable[[Server], None]:
    """Return an observer that calls the callbacks of a run, and excludes their costs from those of training."""
    costs, backend = run.experiment.costs, run.experiment.backend
    meter = Meter(lambda: backend.workers_usage, background=lambda: checkpoints.background.cpu_seconds)

    def observe(server: Server) -> None:
        meter.pause(costs)
        checkpoints.collect()
        if server.round:
            run.after_round()
        else:  # the setup has finished
            checkpoints.after_round(run.state())
        meter.resume(measure_memory=checkpoints.leaves_memory_alone)

    return observe


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """Return the content of ``run.toml`` other than the settings."""
    summary, facts = FederationSummary.of(experiment.federation), experiment.method.facts
    return {
        "given_in_python": experiment.given,
        **({"objects": experiment.objects} if experiment.objects else {}),
        "method": {
            "text": str(experiment.method),
            "all_options": experiment.method.full_text,
            "data_derived_uploads": facts.data_derived_uploads,
            "granularity": facts.granularity,
            **({name: getattr(facts, name) for name in ("protects", "noise_at", "noise_from")} if facts.protects else {}),
            "pools_data": experiment.method.population is not None,
        },
        "data": summary.identity(),
        "model": {
            "type": type(experiment.bench.model).__name__,
            "parameters": sum(p.numel() for p in experiment.bench.model.parameters()),
            "head": experiment.bench.head or "",
        },
        "origins": dict(experiment.origins),
        "outline": summary.outline(),
        "plan": experiment.plan_table(),
        **headline_table(experiment.headline),
    }


def resume(
    path: str | Path,
    data: Any = None,
    how: Reopening = UNCHANGED,
    callbacks: Sequence[Callback] = (),
    split: str = "test",
    backend: BackendFor = backend_for,
    objects: Mapping[str, Any] | None = None,
) -> Result:
    """Resume a run from its last good checkpoint, with the same result as an uninterrupted run.

    Args:
        path: The run folder. If the run has finished, its result is returned without calling callbacks.
        data: The data, if it was given in Python.
        how: Other objects that were given in Python, and differences of this machine. Callbacks receive the messages, not ``notify``.
        callbacks: Called after those of the run.
        split: Data to score: test or validation.
        backend: Creates the backend.
        objects: Optimizer, loss, schedule and augmentation that the run was given as objects.
    """
    folder, notify = RunFolder(path), Callbacks(callbacks).message
    given = dict(objects or {})
    recorded = {name: given.get(name) for name in OBJECT_SETTINGS}
    folder.require_objects({"data": data, "method": how.method, "model": how.model, **recorded})
    model = None if isinstance(how.model, str) else how.model
    experiment = Experiment(how.settings_of(folder), data, how.method, model, backend, folder.recorded_inputs())
    experiment.set_headline(recorded_headline(folder.document()))
    experiment.origins = folder.document().get("origins", {})
    use_objects(experiment, given)
    folder.require_data(FederationSummary.of(experiment.federation).identity())
    experiment.backend.keep_in(folder.path)
    snapshot, complaints = folder.read()
    if not is_finished(snapshot):
        with folder.locked():
            snapshot, complaints = folder.read()  # another process may have trained it in the meantime
            if not is_finished(snapshot):
                best = restore_snapshot(experiment, folder, snapshot, complaints, notify)
                return train_run(experiment, folder, callbacks, split, resumed=True, best=best)
    restore_snapshot(experiment, folder, snapshot, complaints, notify)
    save_newcomer(experiment, folder.path, overwrite=False)
    answers = {} if snapshot is None else read_answers(folder, snapshot.notes)
    lines = folder.metrics()
    return Result(experiment, rows_at(lines, experiment.server.round, split), str(path), answers, scored_rounds(lines, split))


def is_finished(snapshot: Snapshot | None) -> bool:
    return snapshot is not None and bool(snapshot.notes["finished"])


def restore_snapshot(
    experiment: Experiment, folder: RunFolder, snapshot: Snapshot | None, complaints: Sequence[str], notify: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Restore an experiment and its metrics from a checkpoint, and return its notes about the best round so far."""
    for complaint in complaints:
        notify(f"{complaint} Using the previous checkpoint.")
    if snapshot is None and complaints:
        raise RunFolderError(f"{folder.path} has no good checkpoint left. Restart the run with another --out.")
    if snapshot is None or snapshot.round == 0:  # the setup runs again, and its costs must not count twice
        folder.truncate_metrics(0)
        return None
    experiment.restore(snapshot)
    if not folder.truncate_metrics(snapshot.notes["metrics_size"]):  # older checkpoints do not seal the metrics
        notify(f"{folder.metrics_file} has fewer lines than its checkpoint recorded: some scores of earlier rounds are lost.")
    best: Mapping[str, Any] | None = snapshot.notes.get("best")
    return best
