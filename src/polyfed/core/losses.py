"""Task losses by name: from a model's outputs and targets to the scalar that is minimised. Each names the tasks that it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.registry import Registry
from polyfed.core.tasks.known import TASKS
from polyfed.core.tasks.segmentation import IGNORED
from polyfed.core.tasks.task import Task
from polyfed.errors import DataError, OptionError, SettingError
from polyfed.settings import AUTO
from polyfed.text import read_call


class Loss(Protocol):
    """Anything that turns a batch of outputs and targets into a scalar."""

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


@dataclass(frozen=True)
class PixelCrossEntropy:
    """``-log p_y``, mean over the pixels that have a class; 0 where none has."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp_min(1)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """``-w_l y_l log p_l - (1 - y_l) log(1 - p_l)``, mean over labels and batch.

    Attributes:
        positive: The weight of each label where it is there; empty: 1.
    """

    positive: tuple[float, ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.positive and logits.shape[1] != len(self.positive):
            raise OptionError(
                f"binary_cross_entropy: positive has {len(self.positive)} weights, but there are {logits.shape[1]} labels."
            )
        weights = torch.tensor(self.positive, dtype=logits.dtype, device=logits.device) if self.positive else None
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), pos_weight=weights)


@dataclass(frozen=True)
class SquaredError:
    """``(f(x) - y)^2``, mean over outputs and batch."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(logits, labels.to(logits.dtype))


@dataclass(frozen=True)
class AbsoluteError:
    """``|f(x) - y|``, mean over outputs and batch."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.l1_loss(logits, labels.to(logits.dtype))


@dataclass(frozen=True)
class Huber:
    """Squared for errors below ``delta``, absolute beyond, mean over outputs and batch."""

    delta: float

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.huber_loss(logits, labels.to(logits.dtype), delta=self.delta)


def pixel_cross_entropy() -> PixelCrossEntropy:
    """Cross-entropy of each pixel that has a class."""
    return PixelCrossEntropy()


def binary_cross_entropy(positive: tuple[float, ...] = ()) -> BinaryCrossEntropy:
    """Cross-entropy of each label by itself.

    Args:
        positive: One weight per label for examples that have it; default: 1.
    """
    if any(not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0 for weight in positive):
        raise OptionError(
            f"binary_cross_entropy: positive is {positive!r}; it must be a list with one weight per label, none below 0."
        )
    return BinaryCrossEntropy(tuple(float(weight) for weight in positive))


def squared_error() -> SquaredError:
    """The mean squared error."""
    return SquaredError()


def absolute_error() -> AbsoluteError:
    """The mean absolute error."""
    return AbsoluteError()


def huber(delta: float = 1.0) -> Huber:
    """The Huber loss: squared for small errors, absolute for large ones.

    Args:
        delta: Where it turns from one to the other.
    """
    if not (math.isfinite(delta) and delta > 0):
        raise OptionError(f"huber: delta is {delta}; it must be above 0.")
    return Huber(delta)


def loss_name(text: str, task: Task) -> str:
    """The text of a task's loss: as written, or the usual one of the task."""
    return task.default_loss if text == AUTO else text


def task_loss(text: str, task: Task, class_counts: Sequence[int]) -> Loss:
    """The loss of a task; one that asks for the numbers of examples by class is given them.

    Args:
        text: of the settings.
        task: what is learnt.
        class_counts: training examples of each class over all clients, where the task counts any.
    """
    written = loss_name(text, task)
    record = losses.find(read_call(written).name)
    suited = record.extra.get("tasks", tuple(TASKS))
    if task.name not in suited:
        fitting = [name for name in losses.names() if task.name in losses.find(name).extra.get("tasks", tuple(TASKS))]
        raise SettingError(
            f"The loss {record.name} is for {' and '.join(suited)}, and the task is {task.name}. There are: {', '.join(fitting)}."
        )
    return losses.build(written, class_counts=class_counts or None)


def needs_class_counts(text: str) -> bool:
    """Whether a loss asks for the numbers of examples by class; those of ``auto`` and those without class weights do not."""
    if text == AUTO:
        return False
    call = read_call(text)
    asked = losses.find(call.name).signature.parameters
    written = {**dict(zip(asked, call.positional, strict=False)), **call.named}
    plain = "class_weights" in asked and written.get("class_weights", "none") == "none"
    return "class_counts" in asked and not plain


losses.add(cross_entropy, tasks=("classification",))
losses.add(weighted_focal, tasks=("classification",))
losses.add(pixel_cross_entropy, tasks=("segmentation",))
losses.add(binary_cross_entropy, tasks=("multilabel",))
losses.add(squared_error, tasks=("regression",))
losses.add(absolute_error, tasks=("regression",))
losses.add(huber, tasks=("regression",))
