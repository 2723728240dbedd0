"""Convolutions with scaled weight standardisation, and their conversion to plain convolutions.

W_hat_i = gamma * gain_i * (W_i - mean_i) / sqrt(max(N * var_i, floor)),   N = C_in / groups * kernel positions
"""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from polyfed.errors import ModelError
from polyfed.models.layers.surgery import replace_modules

FLOOR = 1e-4
"""Minimum of N * var, so that a constant filter becomes zeros instead of NaN."""

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


class _Standardised(nn.modules.conv._ConvNd):
    """Base class of the three dimensions. N and ``floor`` are not part of the state.

    Args:
        gamma: Constant factor; sqrt(2 / (1 - 1/pi)) = 1.7139 preserves the variance through ReLU.
        learn_gain: Learn a gain per output channel, with initial value 1.
        unbiased: Divide the variance by N - 1 instead of N.
        floor: Minimum of N * var.
        *args: Arguments of torch's convolution.
        **kwargs: Arguments of torch's convolution.
    """

    gain: nn.Parameter | None

    def __init__(
        self,
        *args: Any,
        gamma: float = 1.0,
        learn_gain: bool = True,
        unbiased: bool = True,
        floor: float = FLOOR,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fan_in = self.weight[0].numel()
        if self.fan_in < 2:
            raise ModelError(
                f"{type(self).__name__}: cannot standardise a filter with a single weight. Use a plain convolution for this layer."
            )
        self.gamma, self.unbiased, self.floor = gamma, unbiased, floor
        nn.init.xavier_normal_(self.weight)
        shape = (self.out_channels,) + (1,) * (self.weight.dim() - 1)
        gain = nn.Parameter(torch.ones(shape, dtype=self.weight.dtype, device=self.weight.device)) if learn_gain else None
        self.register_parameter("gain", gain)

    def centred_and_spread(self) -> tuple[Tensor, Tensor]:
        """Return the filters minus their means, and sqrt(max(N * var, floor)) of each filter."""
        axes = tuple(range(1, self.weight.dim()))
        variance, mean = torch.var_mean(self.weight, dim=axes, correction=int(self.unbiased), keepdim=True)
        return self.weight - mean, (self.fan_in * variance).clamp_min(self.floor).sqrt()

    def standardised_weight(self) -> Tensor:
        centred, spread = self.centred_and_spread()
        weight = centred * (self.gamma / spread)
        return weight if self.gain is None else weight * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardised_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gamma={self.gamma:g}"  # type: ignore[no-untyped-call]


class WSConv1d(_Standardised, nn.Conv1d):
    """A one-dimensional convolution with scaled weight standardisation."""


class WSConv2d(_Standardised, nn.Conv2d):
    """A two-dimensional convolution with scaled weight standardisation (FedWon, Listing 1)."""


class WSConv3d(_Standardised, nn.Conv3d):
    """A three-dimensional convolution with scaled weight standardisation."""


KINDS: dict[type[nn.modules.conv._ConvNd], type[_Standardised]] = {
    nn.Conv1d: WSConv1d,
    nn.Conv2d: WSConv2d,
    nn.Conv3d: WSConv3d,
}


def is_standardised(module: nn.Module) -> bool:
    return isinstance(module, _Standardised)


def is_plain(module: nn.Module) -> bool:
    """Return True for a convolution, except transposed ones, that is not standardised yet."""
    return isinstance(module, tuple(KINDS)) and not is_standardised(module)


def plain_kind(convolution: nn.Module) -> type[nn.modules.conv._ConvNd]:
    """Return torch's class of a convolution.

    Raises:
        ModelError: If the convolution overrides the forward pass, so that it cannot be converted.
    """
    kind = next(kind for kind in KINDS if isinstance(convolution, kind))
    own = type(convolution)
    if not is_standardised(convolution) and (own.forward, own._conv_forward) != (kind.forward, kind._conv_forward):  # type: ignore[attr-defined]
        raise ModelError(
            f"Cannot standardise the weights of {own.__name__}, because it overrides the forward pass. "
            f"Use a model with torch's {kind.__name__}."
        )
    return kind


def geometry(convolution: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """Return the arguments that build a convolution with the same geometry."""
    return {
        "in_channels": convolution.in_channels,
        "out_channels": convolution.out_channels,
        "kernel_size": convolution.kernel_size,
        "stride": convolution.stride,
        "padding": convolution.padding,
        "dilation": convolution.dilation,
        "groups": convolution.groups,
        "padding_mode": convolution.padding_mode,
        "device": convolution.weight.device,
        "dtype": convolution.weight.dtype,
    }


def standardised(convolution: nn.Module, bias: bool, **form: Any) -> _Standardised:
    """Build a standardised convolution with the same geometry: Xavier-normal weights, gain 1, torch's bias initialisation."""
    kind = KINDS[plain_kind(convolution)]
    assert isinstance(convolution, nn.modules.conv._ConvNd)
    return kind(**geometry(convolution), bias=bias, **form).train(convolution.training)


@torch.no_grad()
def standardised_from(
    convolution: nn.Module, scale: Tensor | float = 1.0, bias: Tensor | None = None, **form: Any
) -> _Standardised:
    """Build a standardised convolution with the weights of another one: W_hat = scale * (W - mean), with this bias."""
    assert isinstance(convolution, nn.modules.conv._ConvNd)
    layer = standardised(convolution, bias=bias is not None, **form)
    if layer.gain is None:
        raise ModelError("Pretrained weights need a learnable gain, which stores their scale.")
    layer.weight.copy_(convolution.weight)
    layer.weight.requires_grad_(convolution.weight.requires_grad)
    _, spread = layer.centred_and_spread()
    per_channel = torch.as_tensor(scale, dtype=spread.dtype, device=spread.device).reshape(-1, *spread.shape[1:])
    layer.gain.copy_(spread / layer.gamma * per_channel)
    if bias is not None and layer.bias is not None:
        layer.bias.copy_(bias)
    return layer


@torch.no_grad()
def plain(convolution: nn.Module) -> nn.modules.conv._ConvNd:
    """Build the plain convolution that computes the same as a standardised one."""
    assert isinstance(convolution, _Standardised)
    layer = plain_kind(convolution)(**geometry(convolution), bias=convolution.bias is not None)
    layer.weight.copy_(convolution.standardised_weight())
    if layer.bias is not None and convolution.bias is not None:
        layer.bias.copy_(convolution.bias)
    return layer.train(convolution.training)


def fold(model: nn.Module) -> nn.Module:
    """Copy a trained model for prediction, with plain convolutions instead of standardised ones."""
    copied = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        if is_standardised(copied):
            return plain(copied)
        replace_modules(copied, is_standardised, plain)
    return copied
