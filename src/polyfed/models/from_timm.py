"""Networks from timm by name: ``timm:resnet18d(pretrained=True)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from polyfed.errors import MissingExtra, ModelError, UnknownName, nearest
from polyfed.models import models
from polyfed.models.weights import COUNTER, ImagesOfWeights, loads_weights, read_weights
from polyfed.text import Option

HUB_TIMEOUT = 20.0
"""Seconds to wait for a response of the hub."""


def timm(classes: int, input_shape: tuple[int, int, int], name: str, pretrained: bool = False, weights: str = "") -> nn.Module:
    """Build a timm network with a new head: ``timm:resnet18d(pretrained=True)``.

    With pretrained weights, images are normalised as during pretraining and, unless DATA specifies a size, read at the pretraining size.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        name: The network's name in timm, optionally with the name of its weights, such as ``resnet18d.ra2_in1k``.
        pretrained: Start from timm's weights for this network, with a new head.
        weights: File to read the weights from, with timm's entry names: .safetensors, or .pth written by torch.save.
    """
    library = _library()
    settings = _settings(name)
    options: dict[str, Any] = {"num_classes": classes, "in_chans": input_shape[0]}
    if settings is not None and settings.fixed_input_size:
        options["img_size"] = input_shape[1:]  # vision transformers are built for one image size
    if weights and loads_weights():
        state = read_weights(weights, name)
        with torch.random.fork_rng(devices=[]):  # so that the head gets the same random values as with weights from the hub
            whole = library.create_model(name.partition(".")[0])
        require_entries(state, whole, settings, name, weights)
        # timm adapts the first layer to the channels, and position embeddings to the image size.
        options["pretrained_cfg_overlay"] = {"state_dict": state, "custom_load": False}
    with offline_if_unreachable() if pretrained and not weights and loads_weights() else nullcontext("") as unreachable:
        try:
            model: nn.Module = library.create_model(name, pretrained=bool(pretrained or weights) and loads_weights(), **options)
        except (OSError, RuntimeError, ValueError, HTTPException) as error:
            reason = unreachable or _first_line(error)
            raise ModelError(_problem(name, classes, input_shape, pretrained, weights, reason)) from error
    if pretrained or weights:
        if settings is not None and settings.num_classes == classes:
            model.reset_classifier(classes)  # type: ignore[operator]
        model.normalisation = images_of(name).normalisation(input_shape[0])  # type: ignore[assignment]
    return model


def images_of(name: str) -> ImagesOfWeights:
    settings = _settings(name)
    if settings is None:
        raise ModelError(f"timm has no pretrained weights for {name}. Use pretrained=False.")
    return ImagesOfWeights(int(settings.input_size[-1]), tuple(settings.mean), tuple(settings.std))


def require_entries(state: Mapping[str, Tensor], model: nn.Module, settings: Any, name: str, file: str) -> None:
    """Raise an error if a file lacks entries of the network, which timm would ignore."""
    heads = settings.classifier if settings is not None and settings.classifier else ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    missing = [
        key
        for key in model.state_dict()
        if key not in state and not key.endswith(COUNTER) and not key.startswith(tuple(f"{head}." for head in heads))
    ]
    if missing:
        raise ModelError(f"{name}: the weights in {file} lack {len(missing)} entries of the network, the first is {missing[0]}.")


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Use only the cache inside the block if the hub does not respond; otherwise timm would retry for a minute.

    Yields:
        Reason why the hub cannot be reached; empty if it can.
    """
    try:
        from huggingface_hub import constants
    except ImportError:  # timm reports the missing package
        yield ""
        return
    before = constants.HF_HUB_OFFLINE
    unreachable = "" if before else _hub_problem(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or bool(unreachable)
    try:
        yield unreachable
    finally:
        constants.HF_HUB_OFFLINE = before


def _hub_problem(hub: str) -> str:
    """Return the reason why a hub cannot be reached, or an empty string."""
    from huggingface_hub import get_session

    try:
        get_session().head(hub, timeout=HUB_TIMEOUT)
    except Exception as error:  # the type depends on the HTTP client that the hub's library uses
        return f"cannot reach {urlsplit(hub).hostname} ({_first_line(error)}), and they are not in the local cache"
    return ""


def _library() -> Any:
    try:
        import timm as library
    except ImportError as error:
        raise MissingExtra("Models named timm:NAME need timm. Install it with: pip install 'polyfed[models]'") from error
    return library


def _settings(name: str) -> Any:
    library = _library()
    plain = name.partition(".")[0]
    if not library.is_model(plain):
        known = library.list_models()
        advice = nearest(plain, known)
        advice = advice if advice.startswith("Did you mean") else f"timm.list_models() lists its {len(known)} networks."
        raise UnknownName(f"timm has no network called {name!r}. {advice}")
    try:
        return library.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        known = [each for each in library.list_pretrained() if each.partition(".")[0] == plain]
        raise UnknownName(f"timm has no weights called {name!r}. Choose from: {', '.join(known) or 'none'}.") from error


def _images(options: Mapping[str, Option]) -> ImagesOfWeights:
    return images_of(str(options.get("name", "")))


def _problem(name: str, classes: int, input_shape: tuple[int, int, int], pretrained: bool, weights: str, reason: str) -> str:
    """Return the error message for a network that cannot be built."""
    if weights:
        return f"{name}: the weights in {weights} do not fit the network ({reason})."
    if pretrained:
        return (
            f"Could not load timm's pretrained weights of {name} ({reason}). Connect to the Internet, set HF_HOME to a Hugging Face cache "
            'that contains them, specify a file with weights="FILE", or use pretrained=False.'
        )
    return f"timm cannot build {name} for {classes} classes and images {input_shape}: {reason}."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


models.add(timm, images=_images)
