"""The client CNN of hFedF (its Table 7): small, with two inception modules and no normalisation."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from polyfed.core.data_types import TrainsWith
from polyfed.models import models
from polyfed.models.blocks import Headed, need_choice, need_size, norm_or_not


class Inception(nn.Module):
    """1x1, 3x3 and 5x5 convolutions side by side with a max-pool that passes its input; adds 112 channels.

    The paper gives only the channels (64 to 176 to 288); this is the plain module they add up for.
    """

    def __init__(self, fan_in: int, norm: str) -> None:
        super().__init__()
        self.branch1 = _convolution(fan_in, 32, 1, norm)
        self.branch3 = _convolution(fan_in, 64, 3, norm)
        self.branch5 = _convolution(fan_in, 16, 5, norm)
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Features with 112 channels more, same height and width."""
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.pool(x)], dim=1)


def hfedf_cnn(classes: int, input_shape: tuple[int, int, int], norm: str = "none") -> nn.Module:
    """The client CNN of hFedF; 928,199 parameters with 7 classes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image; the paper's are 32x32.
        norm: "none" as in the paper, or "batch" after each convolution.
    """
    need_choice("hfedf_cnn", "norm", norm, ("none", "batch"))
    need_size("hfedf_cnn", input_shape, 4)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    body["conv1"] = _convolution(input_shape[0], 32, 3, norm)
    body["pool1"] = nn.MaxPool2d(2)
    body["relu1"] = nn.ReLU()
    body["conv2"] = _convolution(32, 32, 1, norm)
    body["conv3"] = _convolution(32, 64, 3, norm)
    body["pool3"] = nn.MaxPool2d(2)
    body["relu3"] = nn.ReLU()
    body["inception1"] = Inception(64, norm)
    body["relu4"] = nn.ReLU()
    body["inception2"] = Inception(176, norm)
    body["relu5"] = nn.ReLU()
    body["average"] = nn.AdaptiveAvgPool2d(3)
    body["flatten"] = nn.Flatten()
    body["dropout"] = nn.Dropout(0.2)
    body["fc"] = nn.Linear(288 * 3 * 3, 256)
    return Headed(body, nn.Linear(256, classes))


def _convolution(fan_in: int, fan_out: int, kernel: int, norm: str) -> nn.Module:
    """A convolution that keeps the size, with its norm if there is one."""
    convolution = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2)
    norms = norm_or_not(norm, fan_out)
    return nn.Sequential(convolution, *norms) if norms else convolution


models.add(hfedf_cnn, batch_norm={"norm": "batch"}, trains_with=TrainsWith(lr=0.002))
