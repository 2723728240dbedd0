"""Files that a run leaves at its end, next to its checkpoint: the answer for each test image, and the newcomer's models.

Answers (label, answer and confidence, no image) are written where the tests are on this machine. They let reports compare two runs image
by image and show the most confident mistakes. Clients elsewhere (Flower nodes) send counts only; worker processes keep their answers.

The newcomer's models are written where clients cannot be asked any more when somebody needs them. Usually one: the server's model with
clients' local layers averaged. Where the method decides itself what a newcomer gets (``local``, ``hfedf``), the file holds each of these
models, under a number, and its metadata how they are put together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from polyfed.core import evaluation
from polyfed.errors import PolyfedError, RunFolderError
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.manifest import ANSWERS_FILE, NEWCOMER_FILE
from polyfed.trees import packed, unpacked

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.folder.run_folder import RunFolder

log = logging.getLogger("polyfed")
TOGETHER = "polyfed.newcomer"

Answers = Mapping[tuple[str, str, str], Mapping[str, Tensor]]
"""``labels``, ``answers`` and ``confidence`` of the test images, by view, client and domain."""


def write_answers(folder: Path, found: Answers) -> None:
    """Write the answers of the last evaluation; without any, no file."""
    if found:
        rows = [{"view": view, "client": client, "domain": domain, **one} for (view, client, domain), one in found.items()]
        try:
            write_atomically(folder / ANSWERS_FILE, packed(rows))
        except OSError as error:
            raise RunFolderError(f"Cannot write {folder / ANSWERS_FILE}: {error.strerror or error}.") from error


def read_answers(folder: RunFolder, notes: Mapping[str, Any]) -> Answers:
    """The answers that a finished run left; nothing where it left none.

    Args:
        folder: the run folder.
        notes: of its last checkpoint, with the seal of the file.
    """
    folder.require_sealed(ANSWERS_FILE, notes)
    path = folder.path / ANSWERS_FILE
    if not path.is_file() or not notes.get("finished"):
        return {}
    try:
        rows = unpacked(path.read_bytes())
        return {
            (row["view"], row["client"], row["domain"]): {name: row[name] for name in ("labels", "answers", "confidence")}
            for row in rows
        }
    except Exception as error:
        raise RunFolderError(f"{path} cannot be read ({type(error).__name__}). Put back a copy, or remove it.") from error


def leave_newcomer(experiment: Experiment, folder: Path, overwrite: bool = True) -> None:
    """Where clients cannot be asked later: ask them for the layers that stayed local, and write the newcomer's models.

    A run without such layers has all it needs in the checkpoint. That nobody answers any more does not spoil the run.

    Args:
        experiment: at its end.
        folder: the run folder.
        overwrite: also where there is such a file already.
    """
    if not (experiment.backend.leaves_newcomer and needs_file(experiment)) or ((folder / NEWCOMER_FILE).exists() and not overwrite):
        return
    try:
        write_atomically(
            folder / NEWCOMER_FILE, _own_models(experiment) if experiment.method.newcomer else _averaged_model(experiment)
        )
    except (PolyfedError, OSError) as error:
        log.warning("There is no model for newcomers (%s): %s", folder / NEWCOMER_FILE, error)


def _averaged_model(experiment: Experiment) -> bytes:
    state = experiment.talk(evaluation.averaged_state(experiment.server))
    return save_safetensors({name: state[name].contiguous().clone() for name in experiment.bench.live})


def _own_models(experiment: Experiment) -> bytes:
    made = experiment.talk(evaluation.own_newcomer(experiment.server))
    tensors = {
        f"{number}/{name}": state[name].contiguous().clone()
        for number, (_, state) in enumerate(made.models)
        for name in experiment.bench.live
    }
    together = {"score": made.score, "weights": [weight for weight, _ in made.models]}
    return save_safetensors(tensors, {TOGETHER: json.dumps(together)})


def needs_file(experiment: Experiment) -> bool:
    """Whether the checkpoint is not enough to make the newcomer's model."""
    plan = experiment.bench.plan
    return bool(plan.local_names) or (experiment.method.newcomer is not None and plan.has_local_entries)


def put_back(experiment: Experiment, folder: Path) -> None:
    """Give the server what was left for newcomers in a run folder; nothing where nothing was."""
    path = folder / NEWCOMER_FILE
    if not path.exists():
        return
    try:
        tensors = load_safetensors(path.read_bytes())
        with safe_open(str(path), framework="pt") as file:
            together = json.loads((file.metadata() or {}).get(TOGETHER, "null"))
        if together is None:
            names = experiment.bench.plan.local_names
            experiment.server.averaged_local_entries = {name: tensors[name] for name in names if name in tensors}
        else:
            experiment.server.saved_newcomer = _newcomer_of(tensors, together)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}). Let the server write it again, or remove it.") from error


def _newcomer_of(tensors: Mapping[str, Tensor], together: Mapping[str, object]) -> evaluation.Newcomer:
    weights = together["weights"]
    if not isinstance(weights, list) or together["score"] not in ("ensemble", "mean_of_models"):
        raise ValueError("it does not say how its models are put together")
    states: list[dict[str, Tensor]] = [{} for _ in weights]
    for name, value in tensors.items():
        number, _, entry = name.partition("/")
        states[int(number)][entry] = value
    return evaluation.Newcomer(list(zip(map(float, weights), states, strict=True)), score=str(together["score"]))
