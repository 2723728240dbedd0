"""Weight standardisation. Differences from the paper: docs/methods/weight_standard.md."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.errors import ModelError
from polyfed.models.layers.surgery import replace_modules
from polyfed.models.layers.ws_conv import geometry, is_plain, plain_kind

EPS = 1e-5


def standardised(weight: Tensor) -> Tensor:
    axes = tuple(range(1, weight.dim()))
    return (weight - weight.mean(axes, keepdim=True)) / (weight.std(axes, keepdim=True) + EPS)


class _UnitConv(nn.modules.conv._ConvNd):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardised(self.weight), self.bias)


class UnitConv1d(_UnitConv, nn.Conv1d):
    """A one-dimensional convolution with standardised weights."""


class UnitConv2d(_UnitConv, nn.Conv2d):
    """A two-dimensional convolution with standardised weights."""


class UnitConv3d(_UnitConv, nn.Conv3d):
    """A three-dimensional convolution with standardised weights."""


KINDS: dict[type[nn.modules.conv._ConvNd], type[_UnitConv]] = {nn.Conv1d: UnitConv1d, nn.Conv2d: UnitConv2d, nn.Conv3d: UnitConv3d}


@dataclass(frozen=True)
class StandardiseWeights(Part):
    """Replace every convolution by one that standardises its weights, with the same parameters and names."""

    stage = "convolution"

    def __call__(self, model: nn.Module) -> nn.Module:
        if self.wanted(model):
            return self.converted(model)
        if replace_modules(model, self.wanted, self.converted) == 0:
            raise ModelError(
                f"weight_standard: {type(model).__name__} has no convolution to standardise. Use a convolutional model, or remove weight_standard."
            )
        return model

    def wanted(self, module: nn.Module) -> bool:
        """Return True for a plain convolution with more than one weight per filter."""
        return is_plain(module) and isinstance(module, nn.modules.conv._ConvNd) and module.weight[0].numel() > 1

    def converted(self, convolution: nn.Module) -> nn.Module:
        kind = KINDS[plain_kind(convolution)]
        assert isinstance(convolution, nn.modules.conv._ConvNd)
        flat = convolution.weight.detach().flatten(1)
        if bool((flat == flat[:, :1]).all(dim=1).any()):
            raise ModelError(
                "weight_standard: a convolution has a filter whose weights are all equal (possibly zero), so its standard deviation is 0. "
                "Use another initialisation, or remove weight_standard."
            )
        made = kind(**geometry(convolution), bias=convolution.bias is not None)
        made.weight, made.bias = convolution.weight, convolution.bias
        return made.train(convolution.training)


@register
def weight_standard() -> Method:
    """Standardise the weights of every convolution, in combination with a norm: group_norm(groups=2) + weight_standard.

        W_hat_i = (W_i - mean(W_i)) / (std(W_i) + 1e-5)      per output filter i, over (input channels, positions)
        y = conv(x, W_hat) + b

    Reference:
        S. Qiao et al. Micro-Batch Training with Batch-Channel Normalization and Weight Standardization. 2019.
        J. Zhong, H.-Y. Chen and W.-L. Chao. Making Batch Normalization Great in Federated Deep Learning. 2023. Table 5, row
        GN+WN.
    """
    return Method(
        "weight_standard",
        surgery=(StandardiseWeights(),),
        standalone=False,
        facts=Facts(extra_work="weights standardised each step"),
    )
