"""A finished run, opened again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.cli.output import warn
from polyfed.errors import DataError, ModelError, RunFolderError

if TYPE_CHECKING:
    from polyfed.checkpoint import Snapshot
    from polyfed.experiment import Experiment
    from polyfed.settings import Settings

HELD_BY_NODES = "data held by nodes"


def settings_of(path: str) -> Settings:
    """The settings of a run folder that can be opened without Python objects."""
    from polyfed.folder import RunFolder

    folder = RunFolder(path)
    settings = folder.settings_to_go_on()
    if HELD_BY_NODES in folder.document().get("given_in_python", []):
        raise DataError(
            f"{path} was trained by Flower nodes, which hold the data. Go on with it there: flwr run APP --run-config 'out=\"{path}\"'."
        )
    folder.require_objects({"data": None, "method": None, "model": None})
    return settings


def read_snapshot(path: str) -> Snapshot:
    """The newest good checkpoint of a run; damaged ones are named."""
    from polyfed.folder import RunFolder

    folder = RunFolder(path)
    folder.document()
    snapshot, complaints = folder.checkpoints.read()
    for complaint in complaints:
        warn(complaint)
    if snapshot is None:
        raise RunFolderError(f"{path} holds no good checkpoint.")
    if not snapshot.notes.get("finished"):
        warn(f"{path} is not finished; this is its state after round {snapshot.round}. Go on with: polyfed resume {path}")
    return snapshot


def open_run(path: str | Path) -> Experiment:
    """The experiment of a run, in the state of its newest good checkpoint."""
    settings = settings_of(str(path))
    snapshot = read_snapshot(str(path))
    from polyfed.experiment import Experiment

    if settings.deliver == "flower":
        # Its virtual nodes kept their state in the run folder: nothing of Flower is needed to look at it.
        from polyfed.flower.node_state import NODES, brought_home

        settings = dataclasses.replace(settings, deliver="process")
        snapshot.clients = brought_home(Path(path) / NODES, snapshot.clients)
    experiment = Experiment(settings)
    own = experiment.server.state
    strange = [n for n, v in snapshot.state.items() if n in experiment.bench.live and (n not in own or own[n].shape != v.shape)]
    unknown = [n for n in snapshot.state if n not in experiment.bench.plan.entries]
    if strange or unknown:
        model = settings.model or experiment.federation.default_model
        raise ModelError(
            f"The weights in {path} do not fit the model {model} ({(strange + unknown)[0]}); it was trained with another model."
        )
    experiment.restore(snapshot)
    return experiment
