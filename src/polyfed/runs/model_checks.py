"""Check before round 1 that a model can be trained on a federation."""

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
    """Initialise lazy layers (``nn.LazyLinear``) with one batch, with values from the current default random stream."""
    if not any(is_lazy(value) for _, value in _entries(model)):
        return
    _tried(model, sample)
    unused = [name for name, value in _entries(model) if is_lazy(value)]
    if unused:
        raise ModelError(
            f"{type(model).__name__} does not use its lazy layer {unused[0].rpartition('.')[0] or unused[0]}, so its shape is "
            "unknown. Remove it, or specify its input size."
        )


def check_output(model: nn.Module, federation: Federation) -> None:
    """Raise an error if the output is not one floating-point number per class, label or output of the task."""
    sample = federation.sample_input()
    output = _tried(model, sample)
    expected = federation.task.output_shape(sample, len(federation.classes))
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != expected:
        raise ModelError(
            f"{type(model).__name__} returns {found} for a batch of {len(sample)}, expected {expected}: one logit per {federation.task.noun} of {federation.name}"
            f"{'' if len(expected) == 2 else ' and pixel'}."
        )
    if not output.is_floating_point():
        raise ModelError(f"{type(model).__name__} returns {output.dtype}, expected floating-point logits (torch.float32).")


def check_entries(model: nn.Module) -> None:
    """Raise an error if parameters or buffers cannot be averaged, compared and saved."""
    for name, value in _entries(model):
        if value.is_complex():
            raise ModelError(
                f"{type(model).__name__}: {name} is complex ({value.dtype}), which polyfed does not average. "
                "Store real and imaginary parts as two real tensors (torch.view_as_real)."
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = "on the device meta" if value.is_meta else "quantized" if value.is_quantized else f"stored as {value.layout}"
            raise ModelError(f"{type(model).__name__}: {name} is {what}; parameters and buffers must be dense tensors with values.")


def require_trainable(model: nn.Module) -> None:
    parameters = [value for value in model.parameters() if value.numel()]
    if not parameters:
        raise ModelError(f"{type(model).__name__} has no parameters to train.")
    if not any(value.requires_grad for value in parameters):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameter: all {len(parameters)} are frozen. Set requires_grad = True "
            "for the parameters to train."
        )


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _tried(model: nn.Module, sample: Tensor) -> Any:
    """Return the output for a batch in eval mode, and convert exceptions of the model to ModelError."""
    training = model.training
    try:
        with torch.no_grad():
            return model.eval()(sample)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{type(model).__name__} does not accept inputs of shape {tuple(sample.shape[1:])}: {str(error) or type(error).__name__}"
        ) from error
    finally:
        model.train(training)
