"""Task losses by name: from logits and labels to the scalar that is minimised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.registry import Registry
from polyfed.errors import DataError, OptionError


class Loss(Protocol):
    """Anything that turns a batch of logits and labels into a scalar."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over the batch."""


@dataclass(frozen=True)
class CrossEntropy:
    """``-log p_y``, mean over the batch; with weights of the classes, the weighted mean."""

    weights: tuple[float, ...] | None = None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.weights is None:
            return F.cross_entropy(logits, labels)
        if logits.shape[1] != len(self.weights):
            raise OptionError(
                f"cross_entropy: there are {len(self.weights)} class weights, but the logits have {logits.shape[1]} classes."
            )
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)[labels]
        each = F.cross_entropy(logits, labels, reduction="none")
        return (weights * each).sum() / weights.sum().clamp_min(torch.finfo(logits.dtype).tiny)


@dataclass(frozen=True)
class WeightedFocal:
    """``-alpha_y (1 - p_y)^gamma log p_y``, mean over the batch.

    Attributes:
        gamma: How strongly easy examples are turned down; 0 gives weighted cross-entropy.
        alpha: The weight of each class.
    """

    gamma: float
    alpha: tuple[float, ...]

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[1] != len(self.alpha):
            raise OptionError(
                f"weighted_focal: alpha has {len(self.alpha)} weights, but the logits have {logits.shape[1]} classes."
            )
        right = F.log_softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1)
        # At p_y = 1 a gamma below 1 has no finite slope; the smallest positive number keeps it finite.
        wrong = (-torch.expm1(right)).clamp_min(torch.finfo(right.dtype).tiny)
        alpha = torch.tensor(self.alpha, dtype=logits.dtype, device=logits.device)[labels]
        return -(alpha * wrong**self.gamma * right).mean()


losses: Registry[Loss] = Registry("loss")
"""The run gives ``class_counts`` to those that ask for it; other options come from the text."""


def cross_entropy(class_weights: str | tuple[float, ...] = "none", class_counts: Sequence[int] | None = None) -> CrossEntropy:
    """Cross-entropy, perhaps with a weight for each class.

    Args:
        class_weights: "none", "balanced" for ``n / n_c`` over all training examples (0 for a class that has none), or one
            weight per class.
        class_counts: Training examples of each class over all clients.
    """
    if class_weights == "none":
        return CrossEntropy()
    return CrossEntropy(_weights("cross_entropy", "class_weights", class_weights, class_counts))


def weighted_focal(
    gamma: float = 2.0, alpha: str | tuple[float, ...] = "balanced", class_counts: Sequence[int] | None = None
) -> WeightedFocal:
    """Focal loss with a weight for each class (Fed-ISIC2019, as FLamby trains it).

    Args:
        gamma: How strongly easy examples are turned down.
        alpha: One weight per class, or "balanced" for ``n / n_c`` over all training examples
            (0 for a class that has none).
        class_counts: Training examples of each class over all clients.
    """
    if not (math.isfinite(gamma) and gamma >= 0):
        raise OptionError(f"weighted_focal: gamma is {gamma}; it must be 0 or larger.")
    return WeightedFocal(gamma, _weights("weighted_focal", "alpha", alpha, class_counts))


def _weights(loss: str, option: str, chosen: str | tuple[float, ...], class_counts: Sequence[int] | None) -> tuple[float, ...]:
    """The weight of each class: balanced, or as they were written."""
    if chosen == "balanced":
        return balanced_weights(class_counts, f"{loss}: {option}='balanced'")
    wanted = f"{loss}: {option} is {chosen!r}; it must be 'balanced' or a list with one weight per class"
    if isinstance(chosen, str):
        raise OptionError(f"{wanted}.")
    numbers = isinstance(chosen, tuple) and all(isinstance(weight, int | float) for weight in chosen)
    if not numbers or not chosen or any(weight < 0 or not math.isfinite(weight) for weight in chosen):
        raise OptionError(f"{wanted}, none below 0.")
    if class_counts is not None and len(class_counts) != len(chosen):
        raise OptionError(f"{loss}: {option} has {len(chosen)} weights, but the data have {len(class_counts)} classes.")
    return tuple(float(weight) for weight in chosen)


def balanced_weights(class_counts: Sequence[int] | None, asked: str) -> tuple[float, ...]:
    """``n / n_c`` for each class, and 0 for a class without examples."""
    if class_counts is None or sum(class_counts) == 0:
        raise DataError(f"{asked} needs the number of training examples of each class, and there is none.")
    total = sum(class_counts)
    return tuple(total / count if count else 0.0 for count in class_counts)


losses.add(cross_entropy)
losses.add(weighted_focal)
