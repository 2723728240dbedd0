"""Convolutions with scaled weight standardisation, and the way back to plain ones.

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
"""The least value of N * var, so that a constant filter gives zeros and not NaN."""

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


class _Standardised(nn.modules.conv._ConvNd):
    """What the three dimensions share.

    Args:
        gamma: constant factor; the gain that keeps variance through ReLU is sqrt(2 / (1 - 1/pi)) = 1.7139.
        learn_gain: whether each output channel has a learnable gain, starting at 1.
        unbiased: whether the variance divides by N - 1 instead of N.
        floor: least value of N * var.
        *args: as of torch's convolution.
        **kwargs: as of torch's convolution.

    N and the floor are plain numbers of the layer, so they are not part of its state.
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
                f"A filter of {type(self).__name__} has a single weight, and one number cannot be standardised. Use a plain convolution there."
            )
        self.gamma, self.unbiased, self.floor = gamma, unbiased, floor
        nn.init.xavier_normal_(self.weight)
        shape = (self.out_channels,) + (1,) * (self.weight.dim() - 1)
        gain = nn.Parameter(torch.ones(shape, dtype=self.weight.dtype, device=self.weight.device)) if learn_gain else None
        self.register_parameter("gain", gain)

    def centred_and_spread(self) -> tuple[Tensor, Tensor]:
        """The filters without their mean, and sqrt(max(N * var, floor)) of each."""
        axes = tuple(range(1, self.weight.dim()))
        variance, mean = torch.var_mean(self.weight, dim=axes, correction=int(self.unbiased), keepdim=True)
        return self.weight - mean, (self.fan_in * variance).clamp_min(self.floor).sqrt()

    def standardised_weight(self) -> Tensor:
        """The weight the convolution uses."""
        centred, spread = self.centred_and_spread()
        weight = centred * (self.gamma / spread)
        return weight if self.gain is None else weight * self.gain

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the standardised weight."""
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
    """Whether it is a convolution of this file."""
    return isinstance(module, _Standardised)


def is_plain(module: nn.Module) -> bool:
    """Whether it is a convolution that is not standardised yet. Transposed convolutions are not meant."""
    return isinstance(module, tuple(KINDS)) and not is_standardised(module)


def plain_kind(convolution: nn.Module) -> type[nn.modules.conv._ConvNd]:
    """Torch's own class of a convolution; one with a forward pass of its own cannot be re-parameterised."""
    kind = next(kind for kind in KINDS if isinstance(convolution, kind))
    own = type(convolution)
    if not is_standardised(convolution) and (own.forward, own._conv_forward) != (kind.forward, kind._conv_forward):  # type: ignore[attr-defined]
        raise ModelError(
            f"{own.__name__} is a convolution with a forward pass of its own, which would be lost if its weights were standardised. "
            f"Use a model with torch's own {kind.__name__}."
        )
    return kind


def description(convolution: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """The arguments that build a convolution of the same geometry."""
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
    """A fresh standardised convolution of the same geometry: Xavier-normal weights, gain 1, torch's own bias initialisation."""
    kind = KINDS[plain_kind(convolution)]
    assert isinstance(convolution, nn.modules.conv._ConvNd)
    made = kind(**description(convolution), bias=bias, **form)
    return made.train(convolution.training)


@torch.no_grad()
def standardised_from(
    convolution: nn.Module, scale: Tensor | float = 1.0, bias: Tensor | None = None, **form: Any
) -> _Standardised:
    """A standardised convolution that keeps the weights: W_hat = scale * (W - mean), with this bias."""
    assert isinstance(convolution, nn.modules.conv._ConvNd)
    made = standardised(convolution, bias=bias is not None, **form)
    if made.gain is None:
        raise ModelError("Weights can be kept only with a learnable gain, which holds their scale.")
    made.weight.copy_(convolution.weight)
    made.weight.requires_grad_(convolution.weight.requires_grad)
    _, spread = made.centred_and_spread()
    per_channel = torch.as_tensor(scale, dtype=spread.dtype, device=spread.device).reshape(-1, *spread.shape[1:])
    made.gain.copy_(spread / made.gamma * per_channel)
    if bias is not None and made.bias is not None:
        made.bias.copy_(bias)
    return made


@torch.no_grad()
def plain(convolution: nn.Module) -> nn.modules.conv._ConvNd:
    """The plain convolution that computes the same as a standardised one."""
    assert isinstance(convolution, _Standardised)
    made = plain_kind(convolution)(**description(convolution), bias=convolution.bias is not None)
    made.weight.copy_(convolution.standardised_weight())
    if made.bias is not None and convolution.bias is not None:
        made.bias.copy_(convolution.bias)
    return made.train(convolution.training)


def fold(model: nn.Module) -> nn.Module:
    """A copy of a trained model with plain convolutions in place of standardised ones: the same function, no extra work.

    The result is for prediction: training it further would train other weights.
    """
    copied = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        if is_standardised(copied):
            return plain(copied)
        replace_modules(copied, is_standardised, plain)
    return copied
