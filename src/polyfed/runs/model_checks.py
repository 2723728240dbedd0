"""Whether a model can be trained on a federation: found out before anything looks at its entries, and before round 1."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyfed.core.data_types import Federation
from polyfed.errors import ModelError, PolyfedError


def materialise(model: nn.Module, sample: Tensor) -> None:
    """Give lazy layers (``nn.LazyLinear``) their shapes by one batch, with values from the stream that is the default just now."""
    if not any(is_lazy(value) for _, value in _entries(model)):
        return
    _tried(model, sample)
    unused = [name for name, value in _entries(model) if is_lazy(value)]
    if unused:
        raise ModelError(
            f"{type(model).__name__} does not use its lazy layer {unused[0].rpartition('.')[0] or unused[0]}, so its shape cannot be "
            "known. Remove it, or write its input size."
        )


def check_output(model: nn.Module, federation: Federation) -> None:
    """Refuse a model whose output is not one real number per class (label, output), as the task says where."""
    sample = federation.sample_input()
    output = _tried(model, sample)
    wanted = federation.task.output_shape(sample, len(federation.classes))
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != wanted:
        raise ModelError(
            f"{type(model).__name__} returns {found} for a batch of {len(sample)}, expected {wanted}: one logit per {federation.task.noun} of {federation.name}"
            f"{'' if len(wanted) == 2 else ' for each pixel'}."
        )
    if not output.is_floating_point():
        raise ModelError(
            f"{type(model).__name__} returns values of {output.dtype}, expected real numbers (torch.float32) as logits."
        )


def check_entries(model: nn.Module) -> None:
    """Refuse parameters and buffers that cannot be averaged, compared and saved."""
    for name, value in _entries(model):
        if value.is_complex():
            raise ModelError(
                f"{type(model).__name__}: {name} holds complex numbers ({value.dtype}), which cannot be averaged entry by entry here. "
                "Keep real and imaginary parts as two real tensors (torch.view_as_real)."
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = "on the device meta" if value.is_meta else "quantized" if value.is_quantized else f"stored as {value.layout}"
            raise ModelError(f"{type(model).__name__}: {name} is {what}; parameters and buffers must be dense tensors with values.")


def require_trainable(model: nn.Module) -> None:
    """Refuse a model that nothing can be trained in."""
    parameters = [value for value in model.parameters() if value.numel()]
    if not parameters:
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    if not any(value.requires_grad for value in parameters):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameter: all {len(parameters)} are frozen. Set requires_grad = True "
            "for those to train."
        )


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _tried(model: nn.Module, sample: Tensor) -> Any:
    """The output for a batch, in eval mode; whatever the model raises is said in a sentence."""
    training = model.training
    try:
        with torch.no_grad():
            return model.eval()(sample)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        why = str(error) or type(error).__name__
        raise ModelError(f"{type(model).__name__} cannot take an input of shape {tuple(sample.shape[1:])}: {why}") from error
    finally:
        model.train(training)
