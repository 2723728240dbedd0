"""Networks from torchvision with a new head: four under their plain names, all others as ``torchvision:NAME``."""

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
from polyfed.models.weights import (
    ImagesOfWeights,
    convert_to_grey,
    head_entries,
    load_entries,
    loads_weights,
    read_weights,
    require_grey_or_rgb,
)
from polyfed.text import Option

NAMED = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "densenet121": "DenseNet-121"}
"""Networks registered under their plain names."""
AUXILIARY = ("googlenet", "inception_v3")
"""Networks with auxiliary heads, which are omitted, and with an input transformation for their weights."""
SIZE_OPTIONS = {"vit": "image_size", "maxvit": "input_size"}
"""Networks that are built for one image size, and the name of the size option."""
DOWNLOAD_TIMEOUT = 30.0
"""Seconds without data after which a download is aborted."""


def torchvision(
    classes: int, input_shape: tuple[int, int, int], name: str, pretrained: bool = False, weights: str = ""
) -> nn.Module:
    """Build a torchvision network by name: ``torchvision:efficientnet_b0(pretrained=True)``.

    With pretrained weights, images are normalised as during pretraining and, unless DATA specifies a size, read at the pretraining size.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        name: The network's name in torchvision, optionally with the name of its weights, such as ``resnet50.IMAGENET1K_V2``.
        pretrained: Start from ImageNet weights with a new head. The default are the first published weights.
        weights: File to read the weights from: .safetensors, or .pth written by torch.save.
    """
    return network(name, classes, input_shape, pretrained, weights)


def network(name: str, classes: int, input_shape: tuple[int, int, int], pretrained: bool, weights: str) -> nn.Module:
    published = published_weights(name)
    channels = input_shape[0]
    require_grey_or_rgb(name, channels)
    build = partial(_build, name, input_shape)
    model = build(classes)
    if pretrained or weights:
        if loads_weights():
            found = _rename_entries(read_weights(weights, name)) if weights else _download(name, published.url)
            load_entries(model, found, head_entries(build, classes), name, weights or published.url)
        if name.partition(".")[0] in AUXILIARY and channels == 1:
            # For RGB images, the network itself turns ImageNet's normalisation into (x - 0.5) / 0.5.
            model.normalisation = (0.5,), (0.5,)  # type: ignore[assignment]
        else:
            model.normalisation = images_of(published).normalisation(channels)  # type: ignore[assignment]
    if channels == 1:
        convert_to_grey(model)
    return model


def published_weights(name: str) -> Any:
    from torchvision import models as library

    plain, _, version = name.partition(".")
    known = library.list_models(module=library)
    if plain not in known:
        advice = nearest(plain, known)
        raise UnknownName(
            f"torchvision has no classification network called {plain!r}. "
            f"{advice if advice.startswith('Did you mean') else f'torchvision.models.list_models() lists its {len(known)} networks.'}"
        )
    versions = list(library.get_model_weights(plain))
    found = [each for each in versions if each.name.lower() == (version or versions[0].name).lower()]
    if not found:
        raise UnknownName(f"{plain} has no weights {version!r}. Choose from: {', '.join(each.name for each in versions)}.")
    return found[0]


def images_of(published: Any) -> ImagesOfWeights:
    transforms = published.transforms()
    return ImagesOfWeights(int(transforms.crop_size[0]), tuple(transforms.mean), tuple(transforms.std))


def _images(name: str, options: Mapping[str, Option]) -> ImagesOfWeights:
    return images_of(published_weights(name or str(options.get("name", ""))))


def _build(name: str, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    from torchvision import models as library

    plain = name.partition(".")[0]
    options: dict[str, Any] = {}
    if plain in AUXILIARY:
        # Set even without weights, because a reopened run reads none and must treat its images in the same way.
        options = {"aux_logits": False, "transform_input": input_shape[0] == 3, "init_weights": True}
    if (size := SIZE_OPTIONS.get(plain.partition("_")[0])) is not None:
        options = {size: input_shape[1] if size == "image_size" else input_shape[1:]}
    try:
        model: nn.Module = library.get_model(plain, weights=None, num_classes=classes, **options)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"torchvision cannot build {plain} for {classes} classes and images {input_shape}: {error}") from error
    return model


def _download(name: str, url: str) -> dict[str, Tensor]:
    """Return weights from torch's cache; download them if necessary."""
    place = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    try:
        with quiet_hub():
            loaded: dict[str, Tensor] = torch.hub.load_state_dict_from_url(url, progress=False, check_hash=True, weights_only=True)
    except (OSError, HTTPException, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        if place.exists():
            raise ModelError(
                f"{name}: the pretrained weights in {place} are damaged or differ from {url}. Delete the file and try again."
            ) from error
        if isinstance(error, HTTPError):
            error.close()  # the error is also the response, which holds the connection
        reason = "the checksum is wrong" if isinstance(error, RuntimeError) else error
        raise ModelError(
            f"{name}: could not download the pretrained weights from {url} ({reason}). "
            f'Connect to the Internet, copy the file to {place}, specify a file with weights="FILE", or use pretrained=False.'
        ) from error
    return _rename_entries(loaded)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Suppress torch's output and set a timeout, which torch lacks."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _rename_entries(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the entries of published DenseNet files from norm.1, conv.1, ... to norm1, conv1, ..."""
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)", r"\1\2", key): value for key, value in weights.items()}


def _add_named(name: str, title: str) -> None:
    def build(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False, weights: str = "") -> nn.Module:
        return network(name, classes, input_shape, pretrained, weights)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"""torchvision's {title}.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from the first published ImageNet weights, as in the papers, with a new head.
        weights: File to read the weights from.
    """
    models.add(build, images=partial(_images, name))


for _name, _title in NAMED.items():
    _add_named(_name, _title)
models.add(torchvision, images=partial(_images, ""))
