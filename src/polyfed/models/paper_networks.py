"""The networks of the papers.

FedWon and FedBN: a six-layer CNN for digits (Table 5), and AlexNet for Office-Caltech-10 and DomainNet (Table 6). FixBN: a LeNet in its
usual form (the paper has no table), and ResNet-20 (He et al. 2016, section 4.2). hFedF: the client CNN (Table 7), and the auto-encoder
whose latent vectors can be used as client embeddings (Table 9).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.data_types import TrainsWith
from polyfed.errors import ModelError, OptionError
from polyfed.models import models


class Headed(nn.Module):
    """A body that computes flat features, and a linear head."""

    def __init__(self, body: OrderedDict[str, nn.Module], head: nn.Linear) -> None:
        super().__init__()
        self.body = nn.Sequential(body)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the head; the method name is timm's."""
        return self.head


def need_size(model: str, input_shape: tuple[int, int, int], minimum: int) -> None:
    _, height, width = input_shape
    if min(height, width) < minimum:
        raise ModelError(
            f"{model} needs images of at least {minimum}x{minimum} pixels, got {height}x{width}. Use larger images or another model."
        )


def need_choice(model: str, option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{model}: {option} must be one of {', '.join(choices)}, got {value!r}.")


VARIANTS = ("fedwon", "fedbn_original")


def six_layer_cnn(classes: int, input_shape: tuple[int, int, int], variant: str = "fedwon") -> nn.Module:
    """Three 5x5 convolutions with batch norm and three linear layers; 14,214,090 parameters for 28x28 pixels and 10 classes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        variant: "fedwon" has dropout 0.5 before the two hidden linear layers; "fedbn_original" has
            batch norm after them instead (five batch norms, 14,219,210 parameters).
    """
    need_choice("six_layer_cnn", "variant", variant, VARIANTS)
    need_size("six_layer_cnn", input_shape, 4)
    channels, height, width = input_shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate([(channels, 64), (64, 64), (64, 128)], start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, 5, padding=2)
        body[f"bn{number}"] = nn.BatchNorm2d(fan_out)
        body[f"relu{number}"] = nn.ReLU()
        if number < 3:
            body[f"pool{number}"] = nn.MaxPool2d(2)
    body["flatten"] = nn.Flatten()
    flat = 128 * (height // 4) * (width // 4)
    for number, (fan_in, fan_out) in enumerate([(flat, 2048), (2048, 512)], start=4):
        add_hidden_layer(body, number, fan_in, fan_out, dropout=variant == "fedwon")
    return Headed(body, nn.Linear(512, classes))


def add_hidden_layer(body: OrderedDict[str, nn.Module], number: int, fan_in: int, fan_out: int, *, dropout: bool) -> None:
    """Append a hidden linear layer with dropout before it, or with batch norm after it."""
    if dropout:
        body[f"dropout{number}"] = nn.Dropout(0.5)
    body[f"fc{number}"] = nn.Linear(fan_in, fan_out)
    if not dropout:
        body[f"bn{number}"] = nn.BatchNorm1d(fan_out)
    body[f"relu{number}"] = nn.ReLU()


models.add(six_layer_cnn)


CONVOLUTIONS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
"""Output channels, kernel, stride and padding."""
POOLED_AFTER = (1, 2, 5)


def alexnet_fedwon(classes: int, input_shape: tuple[int, int, int], variant: str = "fedwon") -> nn.Module:
    """AlexNet with batch norm after each convolution; 57,047,114 parameters for 10 classes and any image size from 63.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        variant: "fedwon" has dropout 0.5 before the two hidden linear layers; "fedbn_original" has
            batch norm after them instead.
    """
    need_choice("alexnet_fedwon", "variant", variant, VARIANTS)
    need_size("alexnet_fedwon", input_shape, 63)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    fan_in = input_shape[0]
    for number, (fan_out, kernel, stride, padding) in enumerate(CONVOLUTIONS, start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, kernel, stride, padding)
        body[f"bn{number}"] = nn.BatchNorm2d(fan_out)
        body[f"relu{number}"] = nn.ReLU()
        if number in POOLED_AFTER:
            body[f"pool{number}"] = nn.MaxPool2d(3, 2)
        fan_in = fan_out
    body["average"] = nn.AdaptiveAvgPool2d(6)
    body["flatten"] = nn.Flatten()
    add_hidden_layer(body, 7, 256 * 6 * 6, 4096, dropout=variant == "fedwon")
    add_hidden_layer(body, 8, 4096, 4096, dropout=variant == "fedwon")
    return Headed(body, nn.Linear(4096, classes))


models.add(alexnet_fedwon, trains_with=TrainsWith(lr=0.01))


def lenet(classes: int, input_shape: tuple[int, int, int], norm: str = "batch") -> nn.Module:
    """Two 5x5 convolutions with pooling, then linear layers of 120 and 84.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        norm: "batch" after each convolution, or "none". Methods such as group_norm replace batch norm by other norms.
    """
    need_choice("lenet", "norm", norm, ("batch", "none"))
    need_size("lenet", input_shape, 16)
    channels, height, width = input_shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate([(channels, 6), (6, 16)], start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, 5)
        if norm == "batch":
            body[f"bn{number}"] = nn.BatchNorm2d(fan_out)
        body[f"relu{number}"] = nn.ReLU()
        body[f"pool{number}"] = nn.MaxPool2d(2)
    body["flatten"] = nn.Flatten()
    # Each side after two unpadded 5x5 convolutions with pooling.
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    for number, (fan_in, fan_out) in enumerate([(flat, 120), (120, 84)], start=3):
        body[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        body[f"relu{number}"] = nn.ReLU()
    return Headed(body, nn.Linear(84, classes))


models.add(lenet, batch_norm={"norm": "batch"})


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut that subsamples and pads with zero channels."""

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
        change = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        # Half of the new channels are inserted before the old ones, half after them.
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        out: Tensor = self.relu2(change + shortcut)
        return out


def resnet20(classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """ResNet-20 with 16, 32 and 64 channels and 19 batch norms; 269,722 parameters for 10 classes.

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


class Inception(nn.Module):
    """Parallel 1x1, 3x3 and 5x5 convolutions and max pooling; adds 112 channels.

    The paper specifies only the channels (64, 176, 288), which this plain inception module matches.
    """

    def __init__(self, fan_in: int, norm: str) -> None:
        super().__init__()
        self.branch1 = _convolution(fan_in, 32, 1, norm)
        self.branch3 = _convolution(fan_in, 64, 3, norm)
        self.branch5 = _convolution(fan_in, 16, 5, norm)
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.pool(x)], dim=1)


def hfedf_cnn(classes: int, input_shape: tuple[int, int, int], norm: str = "none") -> nn.Module:
    """The client CNN of hFedF; 928,199 parameters for 7 classes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image; 32x32 pixels in the paper.
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
    """Build a convolution that preserves the image size, optionally with batch norm."""
    convolution = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(fan_out)) if norm == "batch" else convolution


models.add(hfedf_cnn, batch_norm={"norm": "batch"}, trains_with=TrainsWith(lr=0.002))


class AutoEncoder(nn.Module):
    """Encodes images in [0, 1] as latent vectors and decodes them.

    Args:
        input_shape: Channels, height and width of an image; height and width must be multiples of 4.
        latent: Length of the latent vector.
    """

    def __init__(self, input_shape: tuple[int, int, int], latent: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if height % 4 or width % 4 or min(height, width) < 4:
            raise ModelError(f"hfedf_autoencoder needs image sides that are multiples of 4, got {height}x{width}.")
        if latent < 1:
            raise OptionError(f"hfedf_autoencoder: latent must be at least 1, got {latent}.")
        small = (32, height // 4, width // 4)
        flat = 32 * (height // 4) * (width // 4)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, flat),
            nn.Unflatten(1, small),
            nn.ConvTranspose2d(32, 16, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(16, channels, 2, 2),
            nn.Sigmoid(),
        )

    def encode(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.encoder(x)
        return vectors

    def forward(self, x: Tensor) -> Tensor:
        images: Tensor = self.decoder(self.encoder(x))
        return images


def hfedf_autoencoder(classes: int, input_shape: tuple[int, int, int], latent: int = 1) -> nn.Module:
    """The auto-encoder of hFedF. It outputs images, not logits.

    Args:
        classes: Not used.
        input_shape: Channels, height and width of an image.
        latent: Length of the latent vector and so of the client embedding.
    """
    return AutoEncoder(input_shape, latent)


models.add(hfedf_autoencoder, classifies=False)
