"""Any network of timm by its name, for example ``timm(name="resnet18d")``."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyfed.errors import MissingExtra, ModelError, UnknownName, nearest
from polyfed.models import models


def timm(classes: int, input_shape: tuple[int, int, int], name: str, pretrained: bool = False) -> nn.Module:
    """A network of timm with a head for the classes at hand.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        name: The network's name in timm.
        pretrained: Start from timm's default weights for this network.
    """
    try:
        import timm as library
    except ImportError as error:
        raise MissingExtra("Networks by timm's names need timm. Install it with: pip install 'polyfed[models]'") from error
    plain = name.split(".", 1)[0]
    if not library.is_model(plain):
        raise UnknownName(f"timm has no network called {name!r}. {_nearest(plain, library.list_models())}")
    settings = library.models.get_pretrained_cfg(plain)
    # Vision transformers are made for one image size and must be told another.
    size: dict[str, Any] = {"img_size": input_shape[1:]} if settings is not None and settings.fixed_input_size else {}
    try:
        model: nn.Module = library.create_model(name, pretrained=pretrained, num_classes=classes, in_chans=input_shape[0], **size)
    except (OSError, RuntimeError, ValueError) as error:
        if not pretrained:
            raise ModelError(f"timm cannot build {name} for {classes} classes and images {input_shape}: {error}.") from error
        raise ModelError(
            f"The pretrained weights of timm's {name} could not be loaded ({_first_line(error)}). Connect to the network, "
            "or copy a Hugging Face cache that holds them and name it in HF_HOME, or use pretrained=False."
        ) from error
    return model


def _nearest(name: str, known: list[str]) -> str:
    """The nearest name; the full list is far too long to show."""
    said = nearest(name, known)
    return said if said.startswith("Did you mean") else f"It has {len(known)}: see timm.list_models()."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


models.add(timm)
