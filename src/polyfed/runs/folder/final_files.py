"""Files that a run writes at its end, next to its checkpoint: the prediction for each test image, and the newcomer models.

Predictions (label, answer and confidence, no image) are written if the test data is on this machine. Reports use them to compare runs
image by image and to show the most confident mistakes. Flower nodes send only counts.

Newcomer models are written if clients may not be available later. Usually there is one: the server model with averaged local layers. If
the method defines its newcomer models (``local``, ``hfedf``), the file contains all of them, numbered, and its metadata specifies how to
combine them.
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
METADATA_KEY = "polyfed.newcomer"

Answers = Mapping[tuple[str, str, str], Mapping[str, Tensor]]
"""Maps (view, client, domain) to ``labels``, ``answers`` and ``confidence`` of the test images."""


def write_answers(folder: Path, answers: Answers) -> None:
    """Write the predictions of the last evaluation, if any."""
    if answers:
        rows = [{"view": view, "client": client, "domain": domain, **one} for (view, client, domain), one in answers.items()]
        try:
            write_atomically(folder / ANSWERS_FILE, packed(rows))
        except OSError as error:
            raise RunFolderError(f"Cannot write {folder / ANSWERS_FILE}: {error.strerror or error}.") from error


def read_answers(folder: RunFolder, notes: Mapping[str, Any]) -> Answers:
    """Return the predictions of a finished run, if any; ``notes`` of its last checkpoint contain the digest of the file."""
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
        raise RunFolderError(f"Cannot read {path} ({type(error).__name__}). Restore it from a backup, or remove it.") from error


def save_newcomer(experiment: Experiment, folder: Path, overwrite: bool = True) -> None:
    """Write the newcomer models if the checkpoint is not enough to build them and clients may not be available later.

    A failure is logged, because it does not affect the other results of the run.
    """
    if not (experiment.backend.leaves_newcomer and needs_file(experiment)) or ((folder / NEWCOMER_FILE).exists() and not overwrite):
        return
    try:
        content = _custom_models(experiment) if experiment.method.newcomer else _averaged_model(experiment)
        write_atomically(folder / NEWCOMER_FILE, content)
    except (PolyfedError, OSError) as error:
        log.warning("Could not write the newcomer model (%s): %s", folder / NEWCOMER_FILE, error)


def _averaged_model(experiment: Experiment) -> bytes:
    state = experiment.exchange(evaluation.averaged_state(experiment.server))
    return save_safetensors({name: state[name].contiguous().clone() for name in experiment.bench.live})


def _custom_models(experiment: Experiment) -> bytes:
    made = experiment.exchange(evaluation.own_newcomer(experiment.server))
    tensors = {
        f"{number}/{name}": state[name].contiguous().clone()
        for number, (_, state) in enumerate(made.models)
        for name in experiment.bench.live
    }
    combination = {"score": made.score, "weights": [weight for weight, _ in made.models]}
    return save_safetensors(tensors, {METADATA_KEY: json.dumps(combination)})


def needs_file(experiment: Experiment) -> bool:
    """Return True if the checkpoint is not enough to build the newcomer model."""
    plan = experiment.bench.plan
    return bool(plan.local_names) or (experiment.method.newcomer is not None and plan.has_local_entries)


def restore_newcomer(experiment: Experiment, folder: Path) -> None:
    """Restore the newcomer models from a run folder, if any."""
    path = folder / NEWCOMER_FILE
    if not path.exists():
        return
    try:
        tensors = load_safetensors(path.read_bytes())
        with safe_open(str(path), framework="pt") as file:
            combination = json.loads((file.metadata() or {}).get(METADATA_KEY, "null"))
        if combination is None:
            names = experiment.bench.plan.local_names
            experiment.server.averaged_local_entries = {name: tensors[name] for name in names if name in tensors}
        else:
            experiment.server.saved_newcomer = _newcomer_from(tensors, combination)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"Cannot read {path} ({error}). Remove it, and let the server write it again.") from error


def _newcomer_from(tensors: Mapping[str, Tensor], combination: Mapping[str, object]) -> evaluation.Newcomer:
    weights = combination["weights"]
    if not isinstance(weights, list) or combination["score"] not in ("ensemble", "mean_of_models"):
        raise ValueError("it does not specify how to combine its models")
    states: list[dict[str, Tensor]] = [{} for _ in weights]
    for name, value in tensors.items():
        number, _, entry = name.partition("/")
        states[int(number)][entry] = value
    return evaluation.Newcomer(list(zip(map(float, weights), states, strict=True)), score=str(combination["score"]))
