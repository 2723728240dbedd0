"""The life of a run: begun, trained, ended, resumed. A run with a folder survives being killed at any instant."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from polyfed.backends.choose import BackendFor, backend_for
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.data.federation_summary import FederationSummary
from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.active_run import ActiveRun
from polyfed.runs.callbacks.callback import Callback, Callbacks, StoppedEarly
from polyfed.runs.callbacks.checkpoints import CheckpointWriter
from polyfed.runs.callbacks.evaluation import EarlyStopping, Evaluation
from polyfed.runs.callbacks.training_metrics import TrainingMetrics
from polyfed.runs.costs import Meter, trains_in_this_process
from polyfed.runs.experiment import Experiment, settings_given
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.left_files import leave_newcomer, read_answers
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.given_objects import NAMES as OBJECTS
from polyfed.runs.given_objects import give, parted
from polyfed.runs.headline import as_plain, recorded_headline
from polyfed.runs.result import Result
from polyfed.runs.scores import rows_at, scored_rounds
from polyfed.settings import Settings

if TYPE_CHECKING:
    from polyfed.runs.callbacks.selection import BestValidation

log = logging.getLogger("polyfed")

AS_IT_WAS = Reopening()


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
    """What ``polyfed.run`` does; ``out`` may be a function that names the folder once all settings are known."""
    from polyfed.runs.callbacks.progress import ProgressBar

    plain, objects = parted(values)
    if isinstance(out, str | Path):
        RunFolder(out).refuse_to_overwrite()
    trackers = tracked_by(track)
    experiment = Experiment(settings_given(data, model, plain), data, method, model)
    given = {"data": data, "method": method, "model": model}
    experiment.given = [name for name, value in given.items() if value is not None and not isinstance(value, str | Path)]
    give(experiment, objects)
    folder = out(experiment.settings) if callable(out) else out
    for notice in experiment.notices:
        Callbacks(callbacks).message(notice)
    with ProgressBar(progress) as bar:
        return train_run(experiment, None if folder is None else RunFolder(folder), [*callbacks, *trackers, bar])


def tracked_by(names: str | Sequence[str]) -> list[Callback]:
    from polyfed.runs.callbacks.trackers import trackers

    return trackers(names) if names else []


def train_run(
    experiment: Experiment,
    folder: RunFolder | None = None,
    callbacks: Sequence[Callback] = (),
    split: str = "test",
    resumed: bool = False,
    best: Mapping[str, Any] | None = None,
) -> Result:
    """Train the remaining rounds and score the final model. Whatever happens, the last checkpoint is whole.

    Args:
        experiment: What is trained.
        folder: Where metrics and checkpoints are written; None: nowhere.
        callbacks: Called after those of the run itself.
        split: Data that the run is scored on: test or validation.
        resumed: The folder holds this run already.
        best: What the checkpoint of a resumed run records of the best round so far.
    """
    with contextlib.ExitStack() as until_the_end:
        if folder is not None:
            until_the_end.enter_context(folder.locked())
            experiment.backend.keep_in(folder.path)
            if not resumed:
                folder.create(experiment.settings, facts_of(experiment))
        until_the_end.callback(experiment.backend.close)
        run = ActiveRun(experiment, folder, split, resumed)
        selection = _selection(run, best)
        evaluation, checkpoints = Evaluation(run, selection), CheckpointWriter(run, selection)
        deciding = [selection] if selection else []
        stopping = [EarlyStopping(run, *experiment.settings.patience)] if experiment.settings.patience else []
        # Whoever writes metrics comes before the checkpoint that records their size.
        run.callbacks = [TrainingMetrics(run), *deciding, evaluation, *stopping, checkpoints, *callbacks]
        meter = Meter(trains_in_this_process(experiment.settings), background=lambda: checkpoints.background.cpu_seconds)

        def after_round(server: Server) -> None:
            meter.pause(experiment.costs)
            checkpoints.collect()
            if server.round:
                run.after_round()
            else:  # the setup has run
                checkpoints.after_round(run.state())
            meter.go_on(measure_memory=checkpoints.leaves_memory_alone)

        try:
            run.begin()
            experiment.train([after_round])
        except StoppedEarly as stop:
            log.info("%s", stop)
        except BaseException:
            checkpoints.save_if_between_rounds()
            raise
        try:
            rows = evaluation.final_rows()
            result = Result(experiment, rows, run.path, run.answers, run.by_round)
            for callback in run.callbacks:
                callback.end(result)
        except BaseException:
            checkpoints.settle()
            raise
        return result


def _selection(run: ActiveRun, best: Mapping[str, Any] | None) -> BestValidation | None:
    if not run.experiment.settings.needs_validation:
        return None
    from polyfed.runs.callbacks.selection import chooser_of

    return chooser_of(run, best)


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What ``run.toml`` says in addition to the settings."""
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
        **as_plain(experiment.headline),
    }


def resume(
    path: str | Path,
    data: Any = None,
    how: Reopening = AS_IT_WAS,
    callbacks: Sequence[Callback] = (),
    split: str = "test",
    backend: BackendFor = backend_for,
    objects: Mapping[str, Any] | None = None,
) -> Result:
    """Resume a run from its last good checkpoint, with the same result as an uninterrupted run. A finished run calls no callbacks.

    Args:
        path: The run folder.
        data: The data, if the run was given them in Python.
        how: What else was given in Python, or is elsewhere. Its ``notify`` is not used: callbacks receive the messages.
        callbacks: Called after those of the run itself.
        split: Data that the run is scored on: test or validation.
        backend: Reaches the clients.
        objects: Optimizer, loss, schedule and augmentation that the run was given as objects.
    """
    folder, notify = RunFolder(path), Callbacks(callbacks).message
    given = dict(objects or {})
    folder.require_objects({"data": data, "method": how.method, "model": how.model, **{name: given.get(name) for name in OBJECTS}})
    model = None if isinstance(how.model, str) else how.model
    experiment = Experiment(how.settings_of(folder), data, how.method, model, backend, folder.recorded_inputs())
    experiment.head_by(recorded_headline(folder.document()))
    experiment.origins = folder.document().get("origins", {})
    give(experiment, given)
    folder.require_data(FederationSummary.of(experiment.federation).identity())
    experiment.backend.keep_in(folder.path)
    snapshot, complaints = folder.read()
    if not is_finished(snapshot):
        with folder.locked():
            snapshot, complaints = folder.read()  # until now another process may have trained it
            if not is_finished(snapshot):
                best = restore_snapshot(experiment, folder, snapshot, complaints, notify)
                return train_run(experiment, folder, callbacks, split, resumed=True, best=best)
    restore_snapshot(experiment, folder, snapshot, complaints, notify)
    leave_newcomer(experiment, folder.path, overwrite=False)
    answers = {} if snapshot is None else read_answers(folder, snapshot.notes)
    lines = folder.metrics()
    return Result(experiment, rows_at(lines, experiment.server.round, split), str(path), answers, scored_rounds(lines, split))


def is_finished(snapshot: Snapshot | None) -> bool:
    """Return True if a run has finished. A finished run folder does not change any more."""
    return snapshot is not None and bool(snapshot.notes["finished"])


def restore_snapshot(
    experiment: Experiment, folder: RunFolder, snapshot: Snapshot | None, complaints: Sequence[str], notify: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Put an experiment, and its metrics, in the state of a checkpoint. Returns what it says about the best round so far."""
    for complaint in complaints:
        notify(f"{complaint} The checkpoint before it is used.")
    if snapshot is None and complaints:
        raise RunFolderError(f"{folder.path} has no good checkpoint left; start again with another --out.")
    if snapshot is None or snapshot.round == 0:  # the setup is held again, and what it costs must not count twice
        folder.truncate_metrics(0)
        return None
    experiment.restore(snapshot)
    if not folder.truncate_metrics(snapshot.notes["metrics_size"]):  # of an older polyfed, whose checkpoints do not seal them
        notify(f"{folder.metrics_file} is shorter than its checkpoint says: some scores of earlier rounds are lost.")
    best: Mapping[str, Any] | None = snapshot.notes.get("best")
    return best
