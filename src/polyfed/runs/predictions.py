"""What a run's models say of images, by a client's own model or by the newcomer's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core import evaluation
from polyfed.core.client import Client
from polyfed.core.client import predicted as predicted_by
from polyfed.core.data_types import ArrayExamples
from polyfed.core.device import CPU
from polyfed.data.images import fitted, opened
from polyfed.errors import DataError

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


def input_shape(experiment: Experiment) -> tuple[int, int, int]:
    """Channels, height and width of the run's inputs; a run on something else than images is refused."""
    x, _ = experiment.federation.clients[0].train.batch(slice(0, 1))
    if x.dim() != 4 or str(x.dtype) != "torch.uint8":
        raise DataError(
            f"The inputs of this run are not images (shape {tuple(x.shape[1:])}, {x.dtype}), so images cannot be given to it."
        )
    channels, height, width = x.shape[1:]
    return int(channels), int(height), int(width)


def predicted(experiment: Experiment, images: Tensor, client: str | None = None, newcomer: str | None = None) -> Tensor:
    """What is predicted for each image: probabilities, shape (n, classes), or what the task has."""
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


def client_words(known: Iterable[str], most: int = 12) -> str:
    """The clients there are, in a sentence; many are not all named.

    >>> client_words(["pen", "photo"])
    'The clients are: pen, photo.'
    """
    names = list(known)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"The clients are: {', '.join(names[:most])}{more}."


def models_for(
    experiment: Experiment, client: str | None, newcomer: str, batches: Callable[[], Iterator[Tensor]]
) -> list[tuple[float, Any]]:
    """Weights, and functions that put each model on the bench."""
    server, bench, backend = experiment.server, experiment.bench, experiment.backend
    if client is None:
        made = experiment.talk(evaluation.newcomer(server, bench, newcomer, batches))
        whole = sum(weight for weight, _ in made.models)
        states = [(weight / whole, {n: v for n, v in state.items() if n in bench.live}) for weight, state in made.models]
        return [(weight, lambda state=state: bench.load(state)) for weight, state in states]
    if client not in backend.data:
        raise DataError(f"There is no client {client!r}. {client_words(backend.data)}")
    for prepare in experiment.method.before_evaluation:
        experiment.talk(prepare(server))
    at_work = Client(backend.data[client], bench, backend.state_of(client), server.round)
    return [(1.0, lambda: at_work.receive(server.outgoing(client)))]


def images_as_tensor(images: Any, shape: tuple[int, int, int], middle_square: bool = False) -> Tensor:
    """Images as bytes in the shape of the run's inputs.

    Args:
        images: a uint8 tensor or array (n, channels, height, width) or (n, height, width, channels); or image files, PIL images, or
            single such arrays, in a list. Those of another size are resized.
        shape: channels, height and width.
        middle_square: cut the middle square out of each, as the run's own images were read.
    """
    if isinstance(images, str | Path) or hasattr(images, "convert"):
        images = [images]
    if isinstance(images, Tensor | np.ndarray):
        array = torch.as_tensor(images)
        images = [array] if array.dim() == 3 else list(array)
    if not isinstance(images, Sequence) or not images:
        raise DataError("There are no images. Give a uint8 array (n, channels, height, width), or a list of files or PIL images.")
    return torch.stack([one_image(image, shape, middle_square) for image in images])


def one_image(image: Any, shape: tuple[int, int, int], middle_square: bool = False) -> Tensor:
    """One image as bytes in the shape of the run's inputs, made so by what reads training images."""
    from PIL import Image

    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(f"The inputs of this run have {channels} channels; images have 1 or 3.")
    if isinstance(image, str | Path):
        image = read_file(str(image))
    if isinstance(image, Tensor | np.ndarray):
        image = as_pil(torch.as_tensor(image))
    if not isinstance(image, Image.Image):
        raise DataError(f"Cannot use {type(image).__name__} as an image: give a file, a PIL image, or a uint8 array.")
    image = fitted(image.convert("L" if channels == 1 else "RGB"), (height, width), middle_square)
    array = np.array(image).reshape(height, width, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_file(file: str) -> Any:
    """An image file, opened."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return opened(content, file)


def as_pil(image: Tensor) -> Any:
    """A uint8 array of three dimensions, channels first or last, as a PIL image."""
    from PIL import Image

    if image.dtype != torch.uint8 or image.dim() != 3:
        raise DataError(f"An image is a uint8 array of three dimensions, found {image.dtype} of shape {tuple(image.shape)}.")
    if image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.permute(1, 2, 0)
    if image.shape[2] not in (1, 3):
        raise DataError(f"An image has 1 or 3 channels, found the shape {tuple(image.shape)}.")
    array = image.contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
