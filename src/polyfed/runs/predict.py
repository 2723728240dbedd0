"""Predict new images with a client model or the newcomer model. Images are cropped and resized in the same way as those of the run."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from polyfed.core import evaluation
from polyfed.core.client import Client
from polyfed.core.client import predicted as predicted_by
from polyfed.core.data_types import ArrayExamples, DeepRange, DeepRanges, Federation
from polyfed.core.workbench import CPU
from polyfed.data.store.deep_ranges import DEEP_RANGE, describe_range, of_kind, write_option
from polyfed.data.store.images import (
    DEEP_MODES,
    decoded,
    deep_fitted,
    deep_range,
    extremes,
    fitted,
    is_image,
    number_kind,
    rgb,
)
from polyfed.errors import DataError, SettingError, nearest
from polyfed.settings import FACTS
from polyfed.tasks.task import Prediction

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")

MAX_CLIENTS = 12
"""Maximum number of clients that an error message names."""


@dataclass(frozen=True)
class ImageInputs:
    """The input images of a run.

    Args:
        channels: 3 for colour, 1 for greyscale.
        height: Height in pixels.
        width: Width in pixels.
        middle_square: Crop each image to its central square before resizing it; otherwise its aspect ratio changes.
        deep_ranges: Black and white of images with more than 8 bits, as in the run.
        domain: Domain whose range is used. Default: the range that all domains share.
    """

    channels: int
    height: int
    width: int
    middle_square: bool = False
    deep_ranges: DeepRanges = field(default_factory=dict)
    domain: str | None = None

    @classmethod
    def of(cls, federation: Federation, domain: str | None = None, client: str | None = None) -> ImageInputs:
        """Return the input images of a federation; raise an error if its inputs are not images.

        Without a domain, the range of images with more than 8 bits is that of the domain of the client, if it has one domain.
        """
        x, _ = federation.clients[0].train.batch(slice(0, 1))
        if x.dim() != 4 or x.dtype != torch.uint8:
            raise DataError(
                f"The inputs of this run are not images (shape {tuple(x.shape[1:])}, {x.dtype}), so it cannot predict images."
            )
        channels, height, width = map(int, x.shape[1:])
        if channels not in (1, 3):
            raise DataError(f"The inputs of this run have {channels} channels; images have 1 or 3.")
        ranges = federation.preparation.deep_ranges
        return cls(
            channels, height, width, federation.preparation.middle_square, ranges, _domain_of_images(federation, domain, client)
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def options(self) -> dict[str, int | bool | str]:
        """Return the data set options that produce these images; each data set has some of them."""
        sides = {"height": self.height, "width": self.width}
        return {
            "size": max(self.height, self.width),
            "middle_square": self.middle_square,
            **sides,
            DEEP_RANGE: write_option(self.deep_ranges),
        }

    def tensor(self, images: Any) -> Tensor:
        """Convert images to a uint8 tensor in the input shape of the run.

        Args:
            images: uint8 tensor or array (n, channels, height, width) or (n, height, width, channels); or a list of image files, PIL
                images or single arrays. Images of a different size are resized.
        """
        if isinstance(images, str | Path | Image.Image):
            images = [images]
        if isinstance(images, Tensor | np.ndarray):
            array = torch.as_tensor(images)
            images = [array] if array.dim() == 3 else list(array)
        if not isinstance(images, Sequence) or not images:
            raise DataError(
                "There are no images. Pass a uint8 array (n, channels, height, width), or a list of files or PIL images."
            )
        return torch.stack([self.one(image) for image in images])

    def one(self, image: Any) -> Tensor:
        """Convert one image, with the same functions as for training images."""
        name = str(image) if isinstance(image, str | Path) else "the image"
        if isinstance(image, str | Path):
            image = decoded(_read_file(name), name)
        if isinstance(image, Tensor | np.ndarray):
            image = _as_pil(torch.as_tensor(image))
        if not isinstance(image, Image.Image):
            raise DataError(f"Cannot use {type(image).__name__} as an image. Pass a file, a PIL image, or a uint8 array.")
        if image.mode in DEEP_MODES:
            limits = self._limits(image, name)
            image = Image.fromarray(deep_fitted(image, name, limits, (self.height, self.width), self.middle_square))
        image = rgb(image, name)
        image = image.convert("L") if self.channels == 1 else image
        image = fitted(image, (self.height, self.width), self.middle_square)
        array = np.array(image).reshape(self.height, self.width, self.channels)
        return torch.from_numpy(array).permute(2, 0, 1).contiguous()

    def _limits(self, image: Image.Image, name: str) -> DeepRange:
        """Return black and white of an image with more than 8 bits, as in the run."""
        known = of_kind(self.deep_ranges, number_kind(image))
        lowest, highest = extremes(image, name)
        if not known:
            limits = deep_range(lowest, highest)
            log.warning(
                "%s has more than 8 bits, and the run records no range for such images. It is scaled by its own range, %s, so its "
                "brightness may differ from that in training.",
                name,
                describe_range(limits),
            )
            return limits
        if self.domain not in known and len(set(known.values())) > 1:
            described = ", ".join(f"{domain} {describe_range(limits)}" for domain, limits in known.items())
            raise SettingError(
                f"{name} has more than 8 bits, and the domains of the run scale such images differently ({described}). Specify the "
                "domain of the images with --domain."
            )
        black, white = known.get(self.domain or "", next(iter(known.values())))
        if highest > white or lowest < black:
            log.warning(
                "%s has values from %g to %g. The run scales %s, so values outside are clipped.",
                name,
                lowest,
                highest,
                describe_range((black, white)),
            )
        return black, white


def _domain_of_images(federation: Federation, domain: str | None, client: str | None) -> str | None:
    """Return the domain, checked, or that of the client."""
    ranges, by_client = federation.preparation.deep_ranges, {each.id: each.domains for each in federation.clients}
    if domain is None:
        domains = by_client.get(client or "", ())
        return client if client in ranges else domains[0] if len(domains) == 1 else None
    known = list(dict.fromkeys([*(name for names in by_client.values() for name in names), *ranges]))
    if domain not in known:
        raise DataError(f"Unknown domain {domain!r}. {nearest(domain, known)}")
    return domain


def _read_file(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {file}: {error.strerror or error}.") from error


def _as_pil(image: Tensor) -> Image.Image:
    if image.dtype != torch.uint8 or image.dim() != 3:
        raise DataError(f"An image must be a uint8 array of three dimensions, got {image.dtype} of shape {tuple(image.shape)}.")
    if image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.permute(1, 2, 0)
    if image.shape[2] not in (1, 3):
        raise DataError(f"An image must have 1 or 3 channels, got shape {tuple(image.shape)}.")
    array = image.contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def predicted(experiment: Experiment, images: Tensor, client: str | None = None, newcomer: str | None = None) -> Tensor:
    """Return the predictions for images: probabilities of shape (n, classes), or the equivalent of the task."""
    from polyfed.runs.experiment import threads

    bench = experiment.bench
    batches = evaluation.inputs_of(bench, ArrayExamples(images, torch.zeros(len(images))))
    with threads(experiment.settings.threads), torch.no_grad():
        found = []
        for weight, load in models_for(experiment, client, newcomer or experiment.settings.newcomer, batches):
            load()
            bench.model.eval()
            found.append(weight * torch.cat([predicted_by(bench, x).to(CPU) for x in batches()]))
    return functools.reduce(torch.add, found)


def list_clients(clients: Iterable[str]) -> str:
    """Format the names of clients for an error message.

    >>> list_clients(["pen", "photo"])
    'Clients: pen, photo.'
    """
    names = list(clients)
    more = f" and {len(names) - MAX_CLIENTS} more" if len(names) > MAX_CLIENTS else ""
    return f"Clients: {', '.join(names[:MAX_CLIENTS])}{more}."


def models_for(
    experiment: Experiment, client: str | None, newcomer: str, batches: Callable[[], Iterator[Tensor]]
) -> list[tuple[float, Any]]:
    """Return the weight of each model, with a function that loads it into the workbench."""
    server, bench, backend = experiment.server, experiment.bench, experiment.backend
    if client is None:
        made = experiment.exchange(evaluation.newcomer(server, bench, newcomer, batches))
        total = sum(weight for weight, _ in made.models)
        states = [(weight / total, {n: v for n, v in state.items() if n in bench.live}) for weight, state in made.models]
        return [(weight, lambda state=state: bench.load(state)) for weight, state in states]
    if client not in backend.data:
        raise DataError(f"Unknown client {client!r}. {list_clients(backend.data)}")
    for prepare in experiment.method.before_evaluation:
        experiment.exchange(prepare(server))
    prepared = Client(backend.data[client], bench, backend.state_of(client), server.round)
    return [(1.0, lambda: prepared.receive(server.outgoing(client)))]


@dataclass(frozen=True)
class Predictions:
    """Predictions for image files.

    Attributes:
        rows: For each readable image, its file (``image``), the predicted ``class`` (or the equivalent of the task), its
            ``probability``, and the ``probabilities`` of all classes.
        noun: Noun for a prediction of the task, for example ``class``.
        model: The method and the client or newcomer model.
        unreadable: An error message for each image that could not be read.
        round: Round of the model.
        warning: A warning if the run has no final state, otherwise empty.
    """

    rows: list[dict[str, Any]]
    noun: str
    model: str
    unreadable: list[str]
    round: int
    warning: str = ""


def predict_files(
    open_run: Callable[[], Experiment], images: Sequence[str], client: str | None, newcomer: str | None, domain: str | None = None
) -> Predictions:
    """Do what ``polyfed.predict`` documents; the run is opened after the images have been found."""
    if newcomer is not None and newcomer not in FACTS["newcomer"].choices:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, FACTS['newcomer'].choices)}")
    files: list[str] = []
    for image in images:
        files += [image] if not Path(image).is_dir() else sorted(str(p) for p in Path(image).rglob("*") if is_image(p.name))
    if not files:
        raise DataError(f"No images found in {', '.join(images)}. Pass image files, or folders that contain images.")
    experiment = open_run()
    model = f"{experiment.method}, {_describe_model(experiment, client, newcomer)}"
    model += f", after {experiment.progress}" if experiment.unfinished else ""
    task, classes = experiment.federation.task, experiment.federation.classes
    read, problems = read_images(files, ImageInputs.of(experiment.federation, domain, client))
    scores = list(predicted(experiment, torch.stack(list(read.values())), client, newcomer)) if read else []
    rows = [_prediction_json(file, task.answer(score, classes), task.noun) for file, score in zip(read, scores, strict=True)]
    return Predictions(rows, task.noun, model, problems, experiment.server.round, experiment.unfinished)


def _describe_model(experiment: Experiment, client: str | None, newcomer: str | None) -> str:
    """Describe the model that predicts; raise an error if the newcomer option has no effect."""
    unused = client is not None or experiment.method.newcomer is not None
    if newcomer is not None and unused:
        reason = f"client {client} predicts" if client is not None else f"{experiment.method} defines its own newcomer model"
        raise SettingError(f"--newcomer {newcomer} has no effect: {reason}. Remove the option.")
    if client is not None:
        return f"client {client}"
    return "newcomer" if unused else f"newcomer, {newcomer or experiment.settings.newcomer}"


def read_images(files: Sequence[str], inputs: ImageInputs) -> tuple[dict[str, Tensor], list[str]]:
    """Return images by file, and an error message for each that cannot be read."""
    read: dict[str, Tensor] = {}
    problems = []
    for file in files:
        try:
            read[file] = inputs.one(file)
        except DataError as error:
            problems.append(str(error))
    return read, problems


def _prediction_json(file: str, found: Prediction, noun: str) -> dict[str, Any]:
    by_class = {name: round(value, 6) for name, value in found.probabilities.items()}
    probability = None if math.isnan(found.probability) else found.probability
    return {"image": file, noun: found.label, "probability": probability, "probabilities": by_class}
