"""Client embeddings from images: before round 1 each client trains a small auto-encoder and sends the mean of its latent vectors.

    nu_i = mean over client i's validation images of encoder_i(x);   standardised over clients, then fixed

Part of hFedF (A.1.3, Table 9): every client starts from the same auto-encoder and trains it on 100 of its training images. Not printed, our choice:
mean squared error on pixels in [0, 1], Adam 1e-3, batches of 32, 50 epochs, images resized to 32x32, training images where there is no validation part,
standardised embeddings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.conversation import Ask, Payload, Talk
from polyfed.core.data_types import Examples, in_batches
from polyfed.core.extras import Asked
from polyfed.core.seeds import default_stream
from polyfed.core.server import Server
from polyfed.errors import DataError
from polyfed.methods._shared.generated_weights import MEMORY, Generation
from polyfed.models.hfedf_autoencoder import AutoEncoder

log = logging.getLogger("polyfed")

QUESTION = "latent_mean"
IMAGES, SIDE, BATCH, LR = 100, 32, 32, 1e-3


@dataclass(frozen=True)
class Collect:
    """Ask every client for its mean latent vector, and build the hypernetwork on them."""

    generation: Generation

    def __call__(self, server: Server) -> Talk[None]:
        ids = [info.id for info in server.clients]
        dimension = self.generation.dimension(len(ids))
        question = Payload(extras={"dimension": dimension})
        replies = yield Ask(QUESTION, dict.fromkeys(ids, question))
        vectors = {reply.client: reply.extras[QUESTION] for reply in replies}
        embeddings = standardised(vectors, ids, dimension)
        server.memory[MEMORY] = self.generation.built(server, embeddings)


@dataclass(frozen=True)
class LatentShape:
    """Of what shape a mean latent vector is."""

    generation: Generation

    def __call__(self, asked: Asked) -> tuple[int, ...]:
        return (self.generation.dimension(len(asked.server.clients)),)


def standardised(vectors: dict[str, Tensor], ids: list[str], dimension: int) -> Tensor:
    """One row per client with mean 0 and variance 1 over clients; a client whose vector did not come, or was rejected, gets the mean."""
    silent = [client for client in ids if client not in vectors]
    if silent:
        log.warning("No usable latent vector came from %s; the mean of the others is taken.", ", ".join(silent))
    table = torch.zeros(len(ids), dimension)
    if vectors:
        known = torch.stack(list(vectors.values()))
        spread = known.std(dim=0, correction=0)
        scale = torch.where(spread > 0, spread, 1.0)
        for client, vector in vectors.items():
            table[ids.index(client)] = (vector - known.mean(dim=0)) / scale
    return table


@dataclass(frozen=True)
class Describe:
    """A client's answer: train the common auto-encoder, and give the mean latent vector."""

    epochs: int

    def __call__(self, client: Client, payload: Payload) -> Payload:
        train, validation = client.data.train, client.data.validation
        chosen = torch.randperm(len(train), generator=client.generator)[:IMAGES]
        images = pixels(train.batch(chosen)[0], client.id)
        with default_stream(client.bench.settings.seed, "autoencoder"):
            encoder = AutoEncoder((images.shape[1], SIDE, SIDE), int(payload.extras["dimension"]))
        fit(encoder, images, self.epochs, client.generator)
        return Payload(
            extras={QUESTION: mean_latent(encoder, validation if validation is not None and len(validation) else train, client.id)}
        )


def pixels(x: Tensor, client: str) -> Tensor:
    """Images in [0, 1] of the size the auto-encoder takes."""
    if x.dim() != 4 or (x.is_floating_point() and not 0 <= float(x.min()) <= float(x.max()) <= 1):
        raise DataError(
            f"Client {client}: embeddings by auto-encoder need images with values of 0 to 255 (uint8) or 0 to 1, "
            f'found {x.dtype} of shape {tuple(x.shape)}. Use embedding="learnt".'
        )
    x = x if x.is_floating_point() else x.to(torch.float32) / 255
    if tuple(x.shape[2:]) == (SIDE, SIDE):
        return x
    return nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True).clamp(0, 1)


def fit(encoder: AutoEncoder, images: Tensor, epochs: int, stream: torch.Generator) -> None:
    """Train to make the images again."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=LR)
    for _ in range(epochs):
        for chunk in torch.split(torch.randperm(len(images), generator=stream), BATCH):
            loss = nn.functional.mse_loss(encoder(images[chunk]), images[chunk])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def mean_latent(encoder: AutoEncoder, examples: Examples, client: str) -> Tensor:
    """The mean latent vector of some examples."""
    total = sum(encoder.encode(pixels(x, client)).sum(dim=0) for x, _ in in_batches(examples, 256))
    return torch.as_tensor(total) / len(examples)
