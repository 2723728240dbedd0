"""Networks of torchvision with a head for the classes at hand: four by their own names, all others as ``torchvision:NAME``."""

from __future__ import annotations

import io
import pickle
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch
from torch import Tensor, nn

from polyfed.errors import ModelError, UnknownName, nearest
from polyfed.models import models
from polyfed.models.weights import ImagesOfWeights, are_read, head_of, put_into, read_weights, require_grey_or_colour, see_grey
from polyfed.text import Option

NAMED = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "densenet121": "DenseNet-121"}
"""Networks that have a name of their own here."""
AUXILIARY = ("googlenet", "inception_v3")
"""Networks with more heads in training, which are left out, and with a change of inputs that their weights want."""
OF_ONE_SIZE = {"vit": "image_size", "maxvit": "input_size"}
"""Networks that are built for one size of images, and what the size is called."""
SECONDS_OF_SILENCE = 30.0
"""How long a server may say nothing before a download is given up."""


def torchvision(
    classes: int, input_shape: tuple[int, int, int], name: str, pretrained: bool = False, weights: str = ""
) -> nn.Module:
    """A network of torchvision by its name: ``torchvision:efficientnet_b0(pretrained=True)``.

    With weights, images are normalised as these want it, and read at their size where the text of the data names none.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        name: The network's name in torchvision; ``resnet50.IMAGENET1K_V2`` names its weights too.
        pretrained: Start from ImageNet weights, the first that were published if none are named, with a new head.
        weights: A file to read them from: .safetensors, or .pth of torch.save.
    """
    return network(name, classes, input_shape, pretrained, weights)


def network(name: str, classes: int, input_shape: tuple[int, int, int], pretrained: bool, weights: str) -> nn.Module:
    """A network, with everything but the head from weights where they are asked for."""
    published = published_weights(name)
    channels = input_shape[0]
    require_grey_or_colour(name, channels)
    build = partial(_built, name, input_shape)
    model = build(classes)
    if pretrained or weights:
        if are_read():
            found = _named_as_today(read_weights(weights, name)) if weights else _fetched(name, published.url)
            put_into(model, found, head_of(build, classes), name, weights or published.url)
        model.normalisation = _normalisation(name, published, channels)  # type: ignore[assignment]
    if channels == 1:
        see_grey(model)
    return model


def published_weights(name: str) -> Any:
    """The published weights of a network: those that its name names, or the first."""
    from torchvision import models as library

    plain, _, version = name.partition(".")
    known = library.list_models(module=library)
    if plain not in known:
        said = nearest(plain, known)
        raise UnknownName(
            f"torchvision has no network called {plain!r} that classifies. "
            f"{said if said.startswith('Did you mean') else f'It has {len(known)}: see torchvision.models.list_models().'}"
        )
    versions = list(library.get_model_weights(plain))
    found = [each for each in versions if each.name.lower() == (version or versions[0].name).lower()]
    if not found:
        raise UnknownName(f"{plain} has no weights {version!r}. There are: {', '.join(each.name for each in versions)}.")
    return found[0]


def images_of(published: Any) -> ImagesOfWeights:
    """The images that published weights want."""
    wanted = published.transforms()
    return ImagesOfWeights(int(wanted.crop_size[0]), tuple(wanted.mean), tuple(wanted.std))


def _normalisation(name: str, published: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread by which images with these channels are normalised for published weights."""
    if name.partition(".")[0] in AUXILIARY and channels == 1:
        # In colour the network itself turns ImageNet's normalisation into (x - 0.5) / 0.5; grey images get there directly.
        return (0.5,), (0.5,)
    return images_of(published).normalisation(channels)


def _images(name: str, options: Mapping[str, Option]) -> ImagesOfWeights:
    """The images that the weights want which the options ask for."""
    return images_of(published_weights(name or str(options.get("name", ""))))


def _built(name: str, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network without weights, for three channels."""
    from torchvision import models as library

    plain = name.partition(".")[0]
    options: dict[str, Any] = {}
    if plain in AUXILIARY:
        # Whether weights are read or not: a run that is opened again reads none, and its images must look as they did.
        options = {"aux_logits": False, "transform_input": input_shape[0] == 3, "init_weights": True}
    if (size := OF_ONE_SIZE.get(plain.partition("_")[0])) is not None:
        options = {size: input_shape[1] if size == "image_size" else input_shape[1:]}
    try:
        model: nn.Module = library.get_model(plain, weights=None, num_classes=classes, **options)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"torchvision cannot build {plain} for {classes} classes and images {input_shape}: {error}") from error
    return model


def _fetched(name: str, url: str) -> dict[str, Tensor]:
    """Weights from torch's cache, downloaded into it if need be."""
    place = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    try:
        with hub_kept_short():
            loaded: dict[str, Tensor] = torch.hub.load_state_dict_from_url(url, progress=False, check_hash=True, weights_only=True)
    except (OSError, HTTPException, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        if place.exists():
            raise ModelError(
                f"{name}: the pretrained weights at {place} are damaged or not those of {url}. Remove the file and try again."
            ) from error
        if isinstance(error, HTTPError):
            error.close()  # it is the answer too, and holds the connection
        why = "what came is not the published file" if isinstance(error, RuntimeError) else error
        raise ModelError(
            f"{name}: the pretrained weights could not be fetched from {url} ({why}). "
            f'Connect to the network, or put that file at {place}, or name it with weights="FILE", or use pretrained=False.'
        ) from error
    return _named_as_today(loaded)


@contextmanager
def hub_kept_short() -> Iterator[None]:
    """Without torch's own words on standard output, and with an end to waiting: torch sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS_OF_SILENCE)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _named_as_today(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published DenseNet files name the parts of a dense layer norm.1, conv.1, ...; today's networks name them norm1, conv1, ..."""
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)", r"\1\2", key): value for key, value in weights.items()}


def _add_named(name: str, title: str) -> None:
    def build(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False, weights: str = "") -> nn.Module:
        return network(name, classes, input_shape, pretrained, weights)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"""The {title} of torchvision.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights (the first published, those of the papers), with a new head.
        weights: A file to read them from.
    """
    models.add(build, images=partial(_images, name))


for _name, _title in NAMED.items():
    _add_named(_name, _title)
models.add(torchvision, images=partial(_images, ""))
