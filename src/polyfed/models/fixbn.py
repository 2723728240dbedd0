"""The CNNs that FixBN trains on CIFAR-10: a LeNet (its paper gives no table, so this is the usual shape), and ResNet-20 (He et al. 2016, section 4.2)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.models import models
from polyfed.models.blocks import Headed, need_choice, need_size, norm_or_not


def lenet(classes: int, input_shape: tuple[int, int, int], norm: str = "batch") -> nn.Module:
    """Two 5x5 convolutions with pooling, then linear layers of 120 and 84.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        norm: "batch" after each convolution, or "none". Other norms are put in by a method's surgery.
    """
    need_choice("lenet", "norm", norm, ("batch", "none"))
    need_size("lenet", input_shape, 16)
    channels, height, width = input_shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate([(channels, 6), (6, 16)], start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, 5)
        for layer in norm_or_not(norm, fan_out):
            body[f"bn{number}"] = layer
        body[f"relu{number}"] = nn.ReLU()
        body[f"pool{number}"] = nn.MaxPool2d(2)
    body["flatten"] = nn.Flatten()
    flat = 16 * _after_two_blocks(height) * _after_two_blocks(width)
    for number, (fan_in, fan_out) in enumerate([(flat, 120), (120, 84)], start=3):
        body[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        body[f"relu{number}"] = nn.ReLU()
    return Headed(body, nn.Linear(84, classes))


def _after_two_blocks(side: int) -> int:
    """The side of an image after two unpadded 5x5 convolutions with pooling."""
    return ((side - 4) // 2 - 4) // 2


models.add(lenet, batch_norm={"norm": "batch"})


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to a shortcut that subsamples and pads channels with zeros."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.relu2 = nn.ReLU()
        self.stride = stride
        self.added = fan_out - fan_in

    def forward(self, x: Tensor) -> Tensor:
        """Features, with half the side if the stride is 2."""
        change = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        # Half of the new channels goes before the old ones, half after, so that no position is favoured.
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        out: Tensor = self.relu2(change + shortcut)
        return out


def resnet20(classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """ResNet-20 with 16, 32 and 64 channels and 19 batch norms; 269,722 parameters with 10 classes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
    """
    need_size("resnet20", input_shape, 4)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    body["conv"] = nn.Conv2d(input_shape[0], 16, 3, 1, 1, bias=False)
    body["bn"] = nn.BatchNorm2d(16)
    body["relu"] = nn.ReLU()
    fan_in = 16
    for stage, fan_out in enumerate([16, 32, 64], start=1):
        for block in range(3):
            body[f"stage{stage}_block{block + 1}"] = BasicBlock(fan_in, fan_out, 1 if fan_in == fan_out else 2)
            fan_in = fan_out
    body["average"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    model = Headed(body, nn.Linear(64, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


models.add(resnet20)
