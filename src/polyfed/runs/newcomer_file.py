"""The newcomer's model as a file of the run folder, for runs whose clients cannot be asked any more when somebody needs it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from polyfed.core import evaluation
from polyfed.errors import PolyfedError, RunFolderError
from polyfed.runs.atomic_write import write_atomically
from polyfed.runs.run_folder import NEWCOMER_FILE as FILE

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")


def leave_newcomer(experiment: Experiment, folder: Path, overwrite: bool = True) -> None:
    """Where clients cannot be asked later: ask them for the layers that stayed local, and write the model in which these are averaged.

    A run without such layers, and a method that decides itself what a newcomer gets, have all they need in the checkpoint.
    That nobody answers any more does not spoil the run.

    Args:
        experiment: at its end.
        folder: the run folder.
        overwrite: also where there is such a file already.
    """
    if not (experiment.backend.leaves_newcomer and needs_file(experiment)) or ((folder / FILE).exists() and not overwrite):
        return
    try:
        state = experiment.talk(evaluation.averaged_state(experiment.server))
        data = save_safetensors({name: state[name].contiguous().clone() for name in experiment.bench.live})
        write_atomically(folder / FILE, data)
    except (PolyfedError, OSError) as error:
        log.warning("There is no model for newcomers (%s): %s", folder / FILE, error)


def needs_file(experiment: Experiment) -> bool:
    """Whether the checkpoint is not enough to make the newcomer's model."""
    return bool(experiment.bench.plan.local_names) and experiment.method.newcomer is None


def left_newcomer(folder: Path) -> dict[str, Tensor]:
    """The newcomer's model that was left in a run folder; empty where none was."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        return load_safetensors(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}). Let the server write it again, or remove it.") from error
