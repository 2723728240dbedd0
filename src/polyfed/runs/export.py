"""Export a trained model to ONNX, torch's pt2 or safetensors, and check the file before it is kept.

The exported model maps scaled and normalised images to logits. Its metadata contains the normalisation (``normalised``), the names of
the classes, the input size, how images are resized (``resized``), and the black and white values of images with more than 8 bits by domain
(``deep_ranges``).
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polyfed.core.data_types import DeepRanges, Federation
from polyfed.core.evaluation import models_are_equal
from polyfed.core.workbench import lay_channels_last
from polyfed.errors import MissingExtra, ModelError, RunFolderError, SettingError, nearest
from polyfed.models.layers.folding import Folded, fold_for_prediction
from polyfed.runs.experiment import threads
from polyfed.runs.predict import list_clients, models_for

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

FORMS = ("onnx", "pt2", "safetensors")
IMAGES, LOGITS = "images", "logits"
EXTRA = "Export to ONNX needs additional packages. Install them with: pip install 'polyfed[export]'"
TOLERANCE = 1e-4
"""Maximum difference of logits, relative to the largest logit, that counts as rounding error."""
CHECKED_IMAGES, TIMED_SECONDS, TIMED_PASSES = 8, 0.5, 200
UNFINISHED = ".part"

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Timed:
    """A form of the model: its description, size in bytes, and median seconds per image on one thread."""

    what: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Attributes:
        path: The file.
        whose: ``shared``, ``newcomer``, or ``client`` and its name.
        metadata: Metadata of the file.
        difference: Maximum difference of its logits from those of the trained model, relative to the largest logit.
        folded: The folded layers; None without ``fold``.
        forms: The trained, folded and exported model, each with its size and speed.
    """

    path: Path
    whose: str
    metadata: Mapping[str, str]
    difference: float
    folded: Folded | None
    forms: tuple[Timed, ...]


def export_model(
    experiment: Experiment,
    form: str = "onnx",
    out: str | Path = "model.onnx",
    client: str | None = None,
    newcomer: bool = False,
    fold: bool = False,
) -> Exported:
    """Write a trained model to a file, and remove the file if its logits differ from those of the model.

    Args:
        experiment: The opened run.
        form: onnx, pt2 or safetensors.
        out: The file.
        client: Client whose model is exported. Default: the shared model.
        newcomer: Export the newcomer model, with averaged local layers.
        fold: Convert standardised convolutions and batch norms to plain convolutions.
    """
    require_form(form)
    trained, whose = _chosen_model(experiment, client, newcomer)
    images = _checked_images(experiment)
    folded = fold_for_prediction(trained) if fold else None
    model = trained if folded is None else folded.model
    described = metadata(experiment, whose, fold, client)
    with threads(1), torch.no_grad():
        expected = trained(images)
        difference = require_same(model(images), expected, "the folded model") if fold else 0.0
        with _written_whole(Path(out)) as part:
            exported = WRITERS[form](model, images, part, described)
            difference = max(difference, require_same(exported(images), expected, "the file"))
            state = f"after {experiment.progress}" if experiment.unfinished else "as trained"
            rows: dict[str, tuple[Predict, int]] = {f"{state}, in PyTorch": (trained, _state_size(trained))}
            rows |= {"folded, in PyTorch": (model, _state_size(model))} if fold else {}
            rows |= {f"exported, {RUNS_IT[form]}": (exported, part.stat().st_size)}
            forms = timed(rows, images[:1])
    return Exported(Path(out), whose, described, difference, folded, forms)


def require_form(form: str) -> None:
    """Raise an error for an unknown form, or one whose packages are not installed."""
    if form not in FORMS:
        raise SettingError(f"--to cannot be {form!r}. {nearest(form, FORMS)}")
    if form == "onnx" and any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise MissingExtra(EXTRA)


def _chosen_model(experiment: Experiment, client: str | None, newcomer: bool) -> tuple[nn.Module, str]:
    """Return a copy of the requested model, and its owner."""
    method, known = experiment.method, list(experiment.backend.data)
    if method.predict is not None:
        raise ModelError(
            f"{method} does not predict with the logits of one forward pass, so an exported model would predict differently. "
            "Use polyfed predict."
        )
    if client is not None and newcomer:
        raise SettingError(f"--client {client} and --newcomer select different models. Remove one of them.")
    if client is None and not newcomer and not models_are_equal(method, experiment.bench.plan):
        raise SettingError(
            f"{method} trains one model per client. Choose one with --client, or export the newcomer model with --newcomer. "
            f"{list_clients(known)}"
        )
    if client is None and not newcomer:
        client, whose = known[0], "shared"
    else:
        whose = "newcomer" if client is None else f"client {client}"
    return loaded(experiment, client), whose


def loaded(experiment: Experiment, client: str | None) -> nn.Module:
    """Return a copy of a client model or of the averaged newcomer model on the CPU, in eval mode."""
    found = models_for(experiment, client, "averaged", lambda: iter(()))
    if len(found) > 1:
        raise ModelError(
            f"{experiment.method} has {len(found)} newcomer models, but a file contains one. Choose a client with --client."
        )
    with torch.no_grad():
        found[0][1]()
    made = copy.deepcopy(experiment.bench.model).to("cpu").eval()
    for key, hook in list(made._forward_pre_hooks.items()):
        if hook is lay_channels_last:
            del made._forward_pre_hooks[key]
    return made.requires_grad_(False)


def _checked_images(experiment: Experiment) -> Tensor:
    """Return random images, normalised in the same way as those of the run, or random numbers for other inputs."""
    raw, _ = experiment.federation.clients[0].train.batch(slice(0, 1))
    stream = torch.Generator().manual_seed(0)
    shape = (CHECKED_IMAGES, *raw.shape[1:])
    if raw.dtype == torch.uint8:
        return experiment.federation.preparation.for_testing(torch.randint(0, 256, shape, generator=stream, dtype=torch.uint8))
    if not raw.dtype.is_floating_point:
        raise ModelError(f"Models with inputs of type {raw.dtype} cannot be exported, only with images or floating-point numbers.")
    return torch.randn(shape, generator=stream)


def metadata(experiment: Experiment, whose: str, fold: bool, client: str | None = None) -> dict[str, str]:
    """Return the metadata of the file: text, with lists as JSON. Ranges of deep images are those of the client, if any."""
    raw, _ = experiment.federation.clients[0].train.batch(slice(0, 1))
    preparation = experiment.federation.preparation
    normalised = (
        {"scale": 255.0, "mean": list(preparation.mean), "std": list(preparation.std)} if raw.dtype == torch.uint8 else None
    )
    return {
        "classes": json.dumps(list(experiment.federation.classes), ensure_ascii=False),
        "input_shape": json.dumps(list(raw.shape[1:])),
        "normalised": json.dumps(normalised),
        "resized": json.dumps({"middle_square": preparation.middle_square, "resampling": "bilinear"} if normalised else None),
        "deep_ranges": json.dumps(_deep_ranges(experiment.federation, client), ensure_ascii=False),
        "method": str(experiment.method),
        "data": experiment.federation.name,
        "model": experiment.settings.model or experiment.federation.default_model,
        "whose": whose,
        "round": str(experiment.server.round),
        **({"warning": experiment.unfinished} if experiment.unfinished else {}),
        "folded": json.dumps(fold),
        "format": "polyfed 1",
    }


def _deep_ranges(federation: Federation, client: str | None) -> DeepRanges:
    ranges = federation.preparation.deep_ranges
    own = {name for each in federation.clients if each.id == client for name in (client, *each.domains)}
    return {domain: each for domain, each in ranges.items() if domain in own} or ranges


def require_same(found: Tensor, expected: Tensor, what: str) -> float:
    """Return the relative difference of logits; raise an error if it is more than a rounding error."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    if not difference <= TOLERANCE:
        raise ModelError(
            f"The logits of {what} differ from those of the model by {difference:.1e} of the largest logit, more than the rounding error of "
            f"{TOLERANCE:.0e}. No file was written. Remove --fold, or choose another --to."
        )
    return difference


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary file, which is renamed on success and removed on failure."""
    if path.is_dir():
        raise RunFolderError(f"{path} is a folder. Specify a file with -o.")
    if not path.parent.is_dir():
        raise RunFolderError(f"Folder not found: {path.parent}. Create it, or specify another file with -o.")
    part = path.with_name(f"{path.stem}{UNFINISHED}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_onnx(model: nn.Module, images: Tensor, path: Path, described: Mapping[str, str]) -> Predict:
    """Write an ONNX file with a dynamic batch size, and return it loaded in onnxruntime."""
    import onnxruntime

    with _exporting(model, "onnx"):
        batch = {IMAGES: {0: torch.export.Dim("batch", min=1)}}
        program: Any = torch.onnx.export(
            model, (images,), input_names=[IMAGES], output_names=[LOGITS], dynamic_shapes=tuple(batch.values()), dynamo=True, verbose=False
        )  # fmt: skip
        program.model.metadata_props.update(described)
        program.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run([LOGITS], {IMAGES: x.numpy()})[0])


def write_pt2(model: nn.Module, images: Tensor, path: Path, described: Mapping[str, str]) -> Predict:
    """Write a torch.export program with its metadata in the extra file polyfed.json, and return it loaded."""
    with _exporting(model, "pt2"):
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(model, (images,), dynamic_shapes=shapes)
        torch.export.save(program, path, extra_files={"polyfed.json": json.dumps(described, ensure_ascii=False)})
        again = torch.export.load(path).module()
    return lambda x: again(x)


def _write_safetensors(model: nn.Module, images: Tensor, path: Path, described: Mapping[str, str]) -> Predict:
    """Write the tensors, and return the model with them."""
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    try:
        save_file(state, path, metadata=dict(described))
    except SafetensorError as error:
        raise RunFolderError(f"Cannot write {path}: {error}.") from error
    again = copy.deepcopy(model)
    again.load_state_dict(load_file(path))
    return again


WRITERS: Mapping[str, Callable[[nn.Module, Tensor, Path, Mapping[str, str]], Predict]] = {
    "onnx": write_onnx,
    "pt2": write_pt2,
    "safetensors": _write_safetensors,
}
RUNS_IT = {"onnx": "in onnxruntime", "pt2": "loaded by torch.export", "safetensors": "loaded in PyTorch"}


@contextlib.contextmanager
def _exporting(model: nn.Module, form: str) -> Iterator[None]:
    """Silence the log of torch during export, and convert its exceptions to ModelError."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ModelError(
            f"{type(model).__name__} cannot be exported to {form} ({type(error).__name__}: {first}). Use --to safetensors, or a model "
            "whose control flow does not depend on the values of its inputs."
        ) from error
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _state_size(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def timed(rows: Mapping[str, tuple[Predict, int]], image: Tensor) -> tuple[Timed, ...]:
    """Measure the median seconds per image of each form, in turns, so that other load affects all forms equally."""
    seconds: dict[str, list[float]] = {what: [] for what in rows}
    for predict, _ in rows.values():
        predict(image)
    begin = time.perf_counter()
    while time.perf_counter() - begin < TIMED_SECONDS * len(rows) and len(next(iter(seconds.values()))) < TIMED_PASSES:
        for what, (predict, _) in rows.items():
            start = time.perf_counter()
            predict(image)
            seconds[what].append(time.perf_counter() - start)
    return tuple(Timed(what, size, statistics.median(seconds[what])) for what, (_, size) in rows.items())
