"""Task losses by name. Each declares the tasks that it supports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.errors import DataError, OptionError, SettingError
from polyfed.registry import Registry
from polyfed.settings import AUTO
from polyfed.tasks.known import TASKS
from polyfed.tasks.segmentation import IGNORED
from polyfed.tasks.task import Task
from polyfed.text import read_call

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps a batch of outputs and its targets to the mean loss."""

losses: Registry[Loss] = Registry("loss")
"""The run passes ``class_counts`` to losses with this parameter. Other options come from the expression."""


def cross_entropy(class_weights: str | tuple[float, ...] = "none", class_counts: Sequence[int] | None = None) -> Loss:
    """Cross-entropy, optionally with class weights.

    Args:
        class_weights: "none", "balanced" for ``n / n_c`` over all training examples (0 for a class that has none), or one
            weight per class.
        class_counts: Training examples of each class over all clients.
    """
    if class_weights == "none":
        return F.cross_entropy
    return partial(_weighted_cross_entropy, weights=_weights("cross_entropy", "class_weights", class_weights, class_counts))


def _weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: tuple[float, ...]) -> Tensor:
    """``-w_y log p_y``, over the sum of the weights."""
    of_each = _by_class("cross_entropy: there are {} class weights", weights, logits)[labels]
    each = F.cross_entropy(logits, labels, reduction="none")
    return (of_each * each).sum() / of_each.sum().clamp_min(torch.finfo(logits.dtype).tiny)


def weighted_focal(
    gamma: float = 2.0, alpha: str | tuple[float, ...] = "balanced", class_counts: Sequence[int] | None = None
) -> Loss:
    """Focal loss with class weights (Fed-ISIC2019, as in FLamby).

    Args:
        gamma: Focusing parameter, which reduces the loss of easy examples; 0 gives weighted cross-entropy.
        alpha: One weight per class, or "balanced" for ``n / n_c`` over all training examples
            (0 for a class that has none).
        class_counts: Training examples of each class over all clients.
    """
    if not (math.isfinite(gamma) and gamma >= 0):
        raise OptionError(f"weighted_focal: gamma must be at least 0, got {gamma}.")
    return partial(_focal, gamma=gamma, alpha=_weights("weighted_focal", "alpha", alpha, class_counts))


def _focal(logits: Tensor, labels: Tensor, gamma: float, alpha: tuple[float, ...]) -> Tensor:
    """``-alpha_y (1 - p_y)^gamma log p_y``, mean over the batch."""
    of_each = _by_class("weighted_focal: alpha has {} weights", alpha, logits)[labels]
    right = F.log_softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1)
    # At p_y = 1 and gamma < 1 the gradient is infinite; the smallest positive number keeps it finite.
    wrong = (-torch.expm1(right)).clamp_min(torch.finfo(right.dtype).tiny)
    return -(of_each * wrong**gamma * right).mean()


def _by_class(said: str, weights: tuple[float, ...], logits: Tensor, noun: str = "the logits have {} classes") -> Tensor:
    if logits.shape[1] != len(weights):
        raise OptionError(f"{said.format(len(weights))}, but {noun.format(logits.shape[1])}.")
    return torch.tensor(weights, dtype=logits.dtype, device=logits.device)


def _weights(loss: str, option: str, chosen: str | tuple[float, ...], class_counts: Sequence[int] | None) -> tuple[float, ...]:
    """Return one weight per class: as given, or balanced (``n / n_c``, and 0 for a class without examples)."""
    if chosen == "balanced":
        total = sum(class_counts or ())
        if class_counts is None or not total:
            raise DataError(f"{loss}: {option}='balanced' needs the number of training examples per class, which is not available.")
        return tuple(total / count if count else 0.0 for count in class_counts)
    wanted = f"{loss}: {option} must be 'balanced' or a list with one non-negative weight per class, got {chosen!r}."
    if isinstance(chosen, str):
        raise OptionError(wanted)
    numbers = isinstance(chosen, tuple) and all(isinstance(weight, int | float) for weight in chosen)
    if not numbers or not chosen or any(weight < 0 or not math.isfinite(weight) for weight in chosen):
        raise OptionError(wanted)
    if class_counts is not None and len(class_counts) != len(chosen):
        raise OptionError(f"{loss}: {option} has {len(chosen)} weights, but the data has {len(class_counts)} classes.")
    return tuple(float(weight) for weight in chosen)


def pixel_cross_entropy() -> Loss:
    """Cross-entropy per pixel, without ignored pixels."""
    return _pixel_cross_entropy


def _pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``-log p_y``, mean over the pixels that have a class; 0 if none has."""
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp_min(1)


def binary_cross_entropy(positive: tuple[float, ...] = ()) -> Loss:
    """Binary cross-entropy per label.

    Args:
        positive: One weight per label for positive examples. Default: 1.
    """
    if any(not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0 for weight in positive):
        raise OptionError(
            f"binary_cross_entropy: positive must be a list with one non-negative weight per label, got {positive!r}."
        )
    return partial(_binary_cross_entropy, positive=tuple(float(weight) for weight in positive))


def _binary_cross_entropy(logits: Tensor, labels: Tensor, positive: tuple[float, ...]) -> Tensor:
    """``-w_l y_l log p_l - (1 - y_l) log(1 - p_l)``, mean over labels and batch."""
    said = "binary_cross_entropy: positive has {} weights"
    weights = _by_class(said, positive, logits, "there are {} labels") if positive else None
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), pos_weight=weights)


def squared_error() -> Loss:
    """Mean squared error."""
    return partial(_of_numbers, F.mse_loss)


def absolute_error() -> Loss:
    """Mean absolute error."""
    return partial(_of_numbers, F.l1_loss)


def huber(delta: float = 1.0) -> Loss:
    """Huber loss: squared for small errors, absolute for large ones.

    Args:
        delta: Error at which it changes from squared to absolute.
    """
    if not (math.isfinite(delta) and delta > 0):
        raise OptionError(f"huber: delta must be above 0, got {delta}.")
    return partial(_of_numbers, F.huber_loss, delta=delta)


def _of_numbers(formula: Callable[..., Tensor], outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return formula(outputs, targets.to(outputs.dtype), **options)


def task_loss(text: str, task: Task, class_counts: Sequence[int]) -> Loss:
    """Return the loss of a task.

    Args:
        text: Loss expression of the settings.
        task: Task of the run.
        class_counts: Training examples per class over all clients, for losses with this parameter. Empty if the task has none.
    """
    written = task.default_loss if text == AUTO else text
    record = losses.find(read_call(written).name)
    suited = record.extra.get("tasks", tuple(TASKS))
    if task.name not in suited:
        fitting = [name for name in losses.names() if task.name in losses.find(name).extra.get("tasks", tuple(TASKS))]
        raise SettingError(
            f"The loss {record.name} supports {' and '.join(suited)}, but the task is {task.name}. Choose from: {', '.join(fitting)}."
        )
    return losses.build(written, class_counts=class_counts or None)


def needs_class_counts(text: str) -> bool:
    """Return True if a loss needs the class counts. ``auto`` and losses without class weights do not."""
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
