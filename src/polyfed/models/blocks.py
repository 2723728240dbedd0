"""What the models built here share: a body that makes features, a linear head that makes logits."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import ModelError, OptionError


class Headed(nn.Module):
    """A body that makes flat features, and the linear layer that turns them into logits."""

    def __init__(self, body: OrderedDict[str, nn.Module], head: nn.Linear) -> None:
        super().__init__()
        self.body = nn.Sequential(body)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (n, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def get_classifier(self) -> nn.Linear:
        """The layer that makes the logits (timm's name for it)."""
        return self.head


def need_size(model: str, input_shape: tuple[int, int, int], least: int) -> None:
    """Refuse images smaller than the layers can halve."""
    _, height, width = input_shape
    if min(height, width) < least:
        raise ModelError(
            f"{model} needs images of at least {least}x{least} pixels, found {height}x{width}. Use larger images or another model."
        )


def need_choice(model: str, option: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise OptionError(f"{model}: {option} is {value!r}; it must be one of: {', '.join(choices)}.")


def norm_or_not(norm: str, channels: int) -> list[nn.Module]:
    """Batch norm over the channels, or nothing."""
    return [nn.BatchNorm2d(channels)] if norm == "batch" else []


def padded_to(x: Tensor, multiple: int) -> Tensor:
    """Images with zeros at the right and below, so that both sides are multiples of a number."""
    below, right = (-side % multiple for side in x.shape[-2:])
    return functional.pad(x, (0, right, 0, below)) if below or right else x
