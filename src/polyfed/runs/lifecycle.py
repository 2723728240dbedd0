"""The life of a run: begun, trained, ended, resumed. A run with a folder survives being killed at any instant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.backends.choose import BackendFor, backend_for
from polyfed.core.loop import Observer
from polyfed.core.method import Facts, Method
from polyfed.data.federation_summary import summary_of
from polyfed.data.identity import identity_of
from polyfed.errors import RunFolderError
from polyfed.runs.answers_file import read_answers, write_answers
from polyfed.runs.callback import Callback, Callbacks, StoppedEarly
from polyfed.runs.checkpoint import Snapshot
from polyfed.runs.experiment import Experiment, settings_given
from polyfed.runs.first_loss import FirstLoss
from polyfed.runs.given_objects import NAMES as OBJECTS
from polyfed.runs.given_objects import give, parted
from polyfed.runs.headline import as_plain, recorded_headline
from polyfed.runs.last_rounds import scored_rounds
from polyfed.runs.newcomer_file import leave_newcomer
from polyfed.runs.portable_paths import on_this_machine
from polyfed.runs.progress_bar import progress_bar
from polyfed.runs.recorder import Recorder, rows_at
from polyfed.runs.result import Result
from polyfed.runs.run_folder import RunFolder

log = logging.getLogger("polyfed")


def run_experiment(
    data: Any,
    method: str | Method | None,
    model: str | nn.Module | Callable[..., nn.Module] | None,
    out: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str] = (),
    **values: Any,
) -> Result:
    """What ``polyfed.run`` does."""
    plain, objects = parted(values)
    experiment = Experiment(settings_given(data, model, plain), data, method, model)
    given = {"data": data, "method": method, "model": model}
    experiment.given = [name for name, value in given.items() if value is not None and not isinstance(value, str | Path)]
    give(experiment, objects)
    heard_by = [*callbacks, *tracked_by(track)]
    return train_run(experiment, None if out is None else RunFolder(out), progress=progress, callbacks=heard_by)


def tracked_by(names: str | Sequence[str]) -> list[Callback]:
    """The trackers of these names, as callbacks."""
    from polyfed.runs.trackers import trackers

    return trackers(names) if names else []


def train_run(
    experiment: Experiment,
    folder: RunFolder | None,
    progress: bool | None = False,
    resumed: bool = False,
    observers: Sequence[Observer] = (),
    split: str = "test",
    best: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train and evaluate on a split, with everything written to the folder on the way."""
    if folder is None:
        return trained(experiment, Recorder(experiment, None, split, best), progress, observers, callbacks)
    with folder.locked():
        experiment.backend.keep_in(folder.path)
        if not resumed:
            folder.create(experiment.settings, facts_of(experiment))
        return trained(experiment, Recorder(experiment, folder, split, best), progress, observers, callbacks)


def trained(
    experiment: Experiment,
    recorder: Recorder,
    progress: bool | None,
    observers: Sequence[Observer],
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train to the end, and score the model the run ends with; whatever happens, what was saved is whole."""
    folder, heard_by = recorder.folder, Callbacks(callbacks, recorder)
    try:
        heard_by.begin()
        with progress_bar(experiment, progress) as advance:
            observed_by: list[Observer] = [
                recorder,
                FirstLoss(experiment),
                *([advance] if advance is not None else []),
                *observers,
                heard_by,
            ]
            experiment.train(observed_by, hear=None if folder is None else recorder.drift.hear)
    except StoppedEarly as stop:
        log.info("%s", stop)
    except BaseException:
        recorder.save_if_between_rounds()
        experiment.backend.close()
        raise
    try:
        rows = recorder.final_rows()
        if folder is not None:
            leave_newcomer(experiment, folder.path)
            write_answers(folder.path, recorder.answers)
            recorder.save(at_once=True, finished=True)
    except BaseException:
        recorder.settle()
        raise
    finally:
        experiment.backend.close()
    result = Result(experiment, rows, None if folder is None else str(folder.path), recorder.answers, recorder.by_round)
    heard_by.end(result)
    return result


def privacy_facts(facts: Facts) -> dict[str, str]:
    """Whom a method protects, and where its noise comes from; nothing where it promises nothing."""
    return {"protects": facts.protects, "noise_at": facts.noise_at, "noise_from": facts.noise_from} if facts.protects else {}


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What ``run.toml`` says in addition to the settings."""
    return {
        "given_in_python": experiment.given,
        **({"objects": experiment.objects} if experiment.objects else {}),
        "method": {
            "text": str(experiment.method),
            "all_options": experiment.method.full_text,
            "data_derived_uploads": experiment.method.facts.data_derived_uploads,
            "granularity": experiment.method.facts.granularity,
            **privacy_facts(experiment.method.facts),
            "pools_data": experiment.method.population is not None,
        },
        "data": identity_of(experiment.federation),
        "model": {
            "type": type(experiment.bench.model).__name__,
            "parameters": sum(p.numel() for p in experiment.bench.model.parameters()),
            "head": experiment.bench.head or "",
        },
        "origins": dict(experiment.origins),
        "outline": summary_of(experiment.federation),
        "plan": experiment.plan_table(),
        **as_plain(experiment.headline),
    }


def resume(
    path: str | Path,
    data: Any = None,
    model: Any = None,
    progress: bool | None = False,
    notify: Callable[[str], None] = print,
    observers: Sequence[Observer] = (),
    split: str = "test",
    method: Method | None = None,
    backend: BackendFor | None = None,
    load: Sequence[str] | None = None,
    root: str | None = None,
    device: str | None = None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
    objects: Mapping[str, Any] | None = None,
) -> Result:
    """Go on with a run from its last good checkpoint, to the same end as if it had never stopped.

    ``polyfed.resume`` says what most arguments mean. ``observers`` are called after every round, ``split`` is what the run is evaluated
    on (test or validation), and ``backend`` reaches the clients where the settings do not say it all.
    """
    folder = RunFolder(path)
    settings = on_this_machine(folder.settings_to_go_on(), root, device, load, model)
    folder.name_code(trust)
    given = dict(objects or {})
    folder.require_objects({"data": data, "method": method, "model": model, **{name: given.get(name) for name in OBJECTS}})
    model = None if isinstance(model, str) else model
    experiment = Experiment(settings, data, method, model, backend or backend_for, folder.recorded_inputs())
    experiment.head_by(recorded_headline(folder.document()))
    experiment.origins = folder.document().get("origins", {})
    give(experiment, given)
    folder.require_data(identity_of(experiment.federation))
    experiment.backend.keep_in(folder.path)
    snapshot, complaints = folder.read()
    if not is_finished(snapshot):
        with folder.locked():
            snapshot, complaints = folder.read()  # until now another process may have trained it
            if not is_finished(snapshot):
                best = go_back(experiment, folder, snapshot, complaints, notify)
                return train_run(experiment, folder, progress, True, observers, split, best, callbacks)
    go_back(experiment, folder, snapshot, complaints, notify)
    leave_newcomer(experiment, folder.path, overwrite=False)
    answers = {} if snapshot is None else read_answers(folder, snapshot.notes)
    lines = folder.metrics()
    return Result(experiment, rows_at(lines, experiment.server.round, split), str(path), answers, scored_rounds(lines, split))


def is_finished(snapshot: Snapshot | None) -> bool:
    """Whether a run came to its end; nobody writes to it any more."""
    return snapshot is not None and bool(snapshot.notes["finished"])


def go_back(
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
