"""Any network of timm by its name: ``timm:resnet18d(pretrained=True)``."""

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
from polyfed.models.weights import COUNTER, ImagesOfWeights, are_read, read_weights
from polyfed.text import Option

SECONDS_TO_ANSWER = 20.0
"""How long a hub may take to say anything at all."""


def timm(classes: int, input_shape: tuple[int, int, int], name: str, pretrained: bool = False, weights: str = "") -> nn.Module:
    """A network of timm with a head for the classes at hand: ``timm:resnet18d(pretrained=True)``.

    With weights, images are normalised as these want it, and read at their size where the text of the data names none.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        name: The network's name in timm; ``resnet18d.ra2_in1k`` names its weights too.
        pretrained: Start from timm's weights for this network, with a new head.
        weights: A file to read them from: .safetensors, or .pth of torch.save, with timm's names of entries.
    """
    library = _library()
    settings = _settings(name)
    asked: dict[str, Any] = {"num_classes": classes, "in_chans": input_shape[0]}
    if settings is not None and settings.fixed_input_size:
        asked["img_size"] = input_shape[1:]  # vision transformers are made for one image size and must be told another
    if weights and are_read():
        state = read_weights(weights, name)
        with torch.random.fork_rng(devices=[]):  # so that the head is drawn as with weights from the hub
            whole = library.create_model(name.partition(".")[0])
        require_entries(state, whole, settings, name, weights)
        # timm itself fits the first layer to the channels, and position embeddings to the image size.
        asked["pretrained_cfg_overlay"] = {"state_dict": state, "custom_load": False}
    with hub_asked_once() if pretrained and not weights and are_read() else nullcontext("") as unreachable:
        try:
            model: nn.Module = library.create_model(name, pretrained=bool(pretrained or weights) and are_read(), **asked)
        except (OSError, RuntimeError, ValueError, HTTPException) as error:
            why = unreachable or _first_line(error)
            raise ModelError(_why(name, classes, input_shape, pretrained, weights, why)) from error
    if pretrained or weights:
        if settings is not None and settings.num_classes == classes:
            model.reset_classifier(classes)  # type: ignore[operator]
        model.normalisation = images_of(name).normalisation(input_shape[0])  # type: ignore[assignment]
    return model


def images_of(name: str) -> ImagesOfWeights:
    """The images that the weights of a network want."""
    settings = _settings(name)
    if settings is None:
        raise ModelError(f"timm does not say which images {name} wants, so it cannot start from weights. Use pretrained=False.")
    return ImagesOfWeights(int(settings.input_size[-1]), tuple(settings.mean), tuple(settings.std))


def require_entries(state: Mapping[str, Tensor], model: nn.Module, settings: Any, name: str, file: str) -> None:
    """Refuse a file that lacks entries of the network: timm would leave them as they are."""
    heads = settings.classifier if settings is not None and settings.classifier else ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    missing = [
        key
        for key in model.state_dict()
        if key not in state and not key.endswith(COUNTER) and not key.startswith(tuple(f"{head}." for head in heads))
    ]
    if missing:
        raise ModelError(f"{name}: the weights of {file} lack {len(missing)} entries of the network, the first is {missing[0]}.")


@contextmanager
def hub_asked_once() -> Iterator[str]:
    """Let a hub that does not answer be asked for what it left in its cache only: it would be called for a minute.

    Yields:
        Why the hub cannot be reached; empty where it may be.
    """
    try:
        from huggingface_hub import constants
    except ImportError:  # timm says itself what it lacks
        yield ""
        return
    before = constants.HF_HUB_OFFLINE
    silence = "" if before else _silence(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or bool(silence)
    try:
        yield silence
    finally:
        constants.HF_HUB_OFFLINE = before


def _silence(hub: str) -> str:
    """Why a hub does not answer; empty where it does, whatever it says."""
    from huggingface_hub import get_session

    try:
        get_session().head(hub, timeout=SECONDS_TO_ANSWER)
    except Exception as error:  # the hub's library decides which client this is, and each client has errors of its own
        return f"{urlsplit(hub).hostname} cannot be reached ({_first_line(error)}), and they are not in its cache here"
    return ""


def _library() -> Any:
    try:
        import timm as library
    except ImportError as error:
        raise MissingExtra("Networks by timm's names need timm. Install it with: pip install 'polyfed[models]'") from error
    return library


def _settings(name: str) -> Any:
    """What timm says of a network's weights; None where it has none. An unknown network is refused."""
    library = _library()
    plain = name.partition(".")[0]
    if not library.is_model(plain):
        raise UnknownName(f"timm has no network called {name!r}. {_nearest(plain, library.list_models())}")
    try:
        return library.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        known = [each for each in library.list_pretrained() if each.partition(".")[0] == plain]
        raise UnknownName(f"timm has no weights called {name!r}. There are: {', '.join(known) or 'none'}.") from error


def _images(options: Mapping[str, Option]) -> ImagesOfWeights:
    return images_of(str(options.get("name", "")))


def _why(name: str, classes: int, input_shape: tuple[int, int, int], pretrained: bool, weights: str, why: str) -> str:
    """The sentence that says why there is no network."""
    if weights:
        return f"{name}: the weights of {weights} do not fit the network ({why})."
    if pretrained:
        return (
            f"The pretrained weights of timm's {name} could not be loaded ({why}). Connect to the network, or copy a "
            'Hugging Face cache that holds them and name it in HF_HOME, or name their file with weights="FILE", or use pretrained=False.'
        )
    return f"timm cannot build {name} for {classes} classes and images {input_shape}: {why}."


def _nearest(name: str, known: list[str]) -> str:
    """The nearest name; the full list is far too long to show."""
    said = nearest(name, known)
    return said if said.startswith("Did you mean") else f"It has {len(known)}: see timm.list_models()."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


models.add(timm, images=_images)
