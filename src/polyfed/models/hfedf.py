"""The networks of hFedF: the client CNN (its Table 7), and the auto-encoder whose latent vectors can serve as client embeddings (Table 9)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from polyfed.core.data_types import TrainsWith
from polyfed.errors import ModelError, OptionError
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


class AutoEncoder(nn.Module):
    """Images in [0, 1] to a latent vector and back.

    Args:
        input_shape: Channels, height and width of an image; height and width must be multiples of 4.
        latent: Length of the latent vector.
    """

    def __init__(self, input_shape: tuple[int, int, int], latent: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if height % 4 or width % 4 or min(height, width) < 4:
            raise ModelError(f"hfedf_autoencoder needs image sides that are multiples of 4, found {height}x{width}.")
        if latent < 1:
            raise OptionError(f"hfedf_autoencoder: latent is {latent}; it must be at least 1.")
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
        """Latent vectors, shape (n, latent)."""
        vectors: Tensor = self.encoder(x)
        return vectors

    def forward(self, x: Tensor) -> Tensor:
        """Images made again from their latent vectors, in [0, 1]."""
        images: Tensor = self.decoder(self.encoder(x))
        return images


def hfedf_autoencoder(classes: int, input_shape: tuple[int, int, int], latent: int = 1) -> nn.Module:
    """The auto-encoder of hFedF; it makes images, not logits.

    Args:
        classes: Not used.
        input_shape: Channels, height and width of an image.
        latent: Length of the latent vector, the embedding's dimension.
    """
    return AutoEncoder(input_shape, latent)


models.add(hfedf_autoencoder, classifies=False)
