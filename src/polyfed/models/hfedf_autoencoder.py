"""The auto-encoder whose latent vectors can serve hFedF as client embeddings (its Table 9)."""

from __future__ import annotations

from torch import Tensor, nn

from polyfed.errors import ModelError, OptionError
from polyfed.models import models


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
