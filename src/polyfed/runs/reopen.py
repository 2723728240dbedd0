"""A run, opened again to be looked at and used: its models, its scores, other data. ``lifecycle.resume`` continues it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from polyfed.backends.choose import BackendFor
from polyfed.backends.in_process import WithoutData
from polyfed.core.data_types import Federation
from polyfed.data.federation_summary import FederationSummary, RecordedInputs
from polyfed.errors import ModelError, RunFolderError
from polyfed.models.model_text import images_of_weights
from polyfed.models.weights import weights_skipped
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.client_state_files import NODES, read_states
from polyfed.runs.folder.left_files import put_back, read_answers
from polyfed.runs.folder.manifest import NEWCOMER_FILE, newest_notes
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import HELD_BY_NODES, RunFolder
from polyfed.runs.headline import recorded_headline
from polyfed.runs.result import Result
from polyfed.runs.scores import LAST, rows_at, scored_rounds
from polyfed.settings import AUTO, Settings

ON_ANY_DEVICE = Reopening(device="auto")


def open_run(path: str | Path, how: Reopening) -> Result:
    experiment = open_experiment(path, how)
    folder = RunFolder(path)
    notes = newest_notes(folder.checkpoints.folder)
    lines = folder.sealed_lines(notes)
    by_round = {} if folder.settings().needs_validation else scored_rounds(lines)
    return Result(experiment, rows_at(lines, experiment.server.round), str(path), read_answers(folder, notes), by_round)


def open_experiment(path: str | Path, how: Reopening = ON_ANY_DEVICE, own_data: bool = False) -> Experiment:
    """The experiment of a run, in the state of its newest good checkpoint; with its own data, or with placeholders."""
    folder = RunFolder(path)
    settings = _to_look_at(how.settings_of(folder))
    at_nodes = HELD_BY_NODES in folder.document().get("given_in_python", [])
    folder.require_objects({"method": how.method, "model": how.model} | ({"data": None} if own_data else {}))
    method, model = how.method, None if isinstance(how.model, str) else how.model
    snapshot = read_snapshot(path, how.notify)
    if folder.settings().backend == "flower" and not at_nodes:
        # Its virtual nodes kept their state in the run folder: nothing of Flower is needed to look at it.
        snapshot.clients = read_states(folder.path / NODES, snapshot.clients)
    with weights_skipped():
        if own_data:
            experiment = Experiment(settings, None, method, model, recorded=folder.recorded_inputs())
        else:
            settings = dataclasses.replace(settings, unseen=(), few_shot=0)
            placeholders = _placeholder_federation(folder)
            recorded = RecordedInputs.of(placeholders)
            experiment = Experiment(settings, placeholders, method, model, without_data(at_nodes), recorded)
    experiment.head_by(recorded_headline(folder.document()))
    experiment.origins = folder.document().get("origins", {})
    restore(experiment, snapshot, folder)
    return experiment


def restore(experiment: Experiment, snapshot: Snapshot, folder: RunFolder) -> None:
    """Put the state of a run into its experiment; a state of another model is refused."""
    bench, own = experiment.bench, experiment.server.state
    strange = [n for n, v in snapshot.state.items() if n in bench.live and (n not in own or own[n].shape != v.shape)]
    unknown = [n for n in snapshot.state if n not in bench.plan.entries]
    if strange or unknown:
        model = experiment.settings.model or experiment.federation.default_model
        raise ModelError(
            f"The weights in {folder.path} do not fit the model {model} ({(strange + unknown)[0]}); it was trained with another model."
        )
    experiment.restore(snapshot)
    if _starts_from_weights(folder):
        # They were not read again. What nobody has trained is still in the server's state as it began.
        bench.initial |= {name: value for name, value in snapshot.state.items() if name in bench.live}
    folder.require_sealed(NEWCOMER_FILE, snapshot.notes)
    put_back(experiment, folder.path)


def _to_look_at(settings: Settings) -> Settings:
    """The settings without what only training needs: no score depends on it, and this machine may lack it."""
    return dataclasses.replace(
        settings,
        backend="process",
        workers="1",
        compile="off",
        loss=AUTO,
        selection=LAST if settings.needs_validation else settings.selection,
        early_stopping=None,
        init=None,
    )


def _starts_from_weights(folder: RunFolder) -> bool:
    settings = folder.settings()
    used = settings.model or folder.document().get("outline", {}).get("default_model", "")
    return settings.init is not None or images_of_weights(used) is not None


def _placeholder_federation(folder: RunFolder) -> Federation:
    document = folder.document()
    outline = document.get("outline")
    if not outline:
        raise RunFolderError(
            f"{folder.path / 'run.toml'} does not say enough of the data to open the run without them. "
            f"Where the data are, it can be scored: polyfed evaluate {folder.path}."
        )
    try:
        return FederationSummary.from_outline(outline, document.get("data", {}).get("name", "data")).federation()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise RunFolderError(
            f"The table [outline] of {folder.path / 'run.toml'} is damaged ({type(error).__name__}: {error}). Put back a copy of the file."
        ) from error


def without_data(at_nodes: bool) -> BackendFor:
    return lambda bench, clients: WithoutData(bench, clients, at_nodes)


def read_snapshot(path: str | Path, notify: Callable[[str], None]) -> Snapshot:
    """The newest good checkpoint of a run; damaged ones are named."""
    folder = RunFolder(path)
    folder.document()
    snapshot, complaints = folder.read()
    for complaint in complaints:
        notify(complaint)
    if snapshot is None:
        raise RunFolderError(f"{path} holds no good checkpoint.")
    if not snapshot.notes.get("finished"):
        notify(f"{path} is not finished; this is its state after round {snapshot.round}. Go on with: polyfed resume {path}")
    return snapshot
