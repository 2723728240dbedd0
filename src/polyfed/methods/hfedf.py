"""hFedF: a hypernetwork with aligned and smoothed gradients. Differences from the paper: docs/methods/hfedf.md."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.data_types import Examples, in_batches
from polyfed.core.method import Method, register
from polyfed.core.part import Part
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Exchange, Payload, Request
from polyfed.core.seeds import default_stream, generator
from polyfed.core.server import Server
from polyfed.errors import DataError, OptionError
from polyfed.extras import Array
from polyfed.methods._shared.generated_weights import (
    HYPERNETWORK_OPTIONS,
    MEMORY,
    GeneratedRound,
    Generation,
    ServerOptimizer,
    generating_method,
)
from polyfed.methods._shared.hypernetwork import Generator
from polyfed.models.paper_networks import AutoEncoder

log = logging.getLogger("polyfed")

REQUEST = "latent_mean"
IMAGES, SIDE, BATCH, LR = 100, 32, 32, 1e-3


@dataclass(frozen=True)
class JointRound(GeneratedRound):
    """Train all clients from their generated models; the hypernetwork takes one step along their combined gradient."""

    align: bool
    ema_alpha: float | None
    warmup: int

    def __call__(self, server: Server) -> Exchange[None]:
        request = server.request("train", server.sample_clients())
        replies = yield request
        deltas = self.generation.absorbed(server, request, replies)
        maker = self.generation.generator(server)
        weights = maker.learn(deltas, self.align, self.ema_alpha if server.round > self.warmup else None)
        log.debug("Round %d: weights %s.", server.round, dict(zip(deltas, weights.tolist(), strict=True)))
        server.log_client_metric("alignment_weight", dict(zip(deltas, weights.tolist(), strict=True)))
        server.log_client_metric("embedding", maker.embeddings())
        if self.generation.embedding == "random":
            redraw(maker, server, self.generation.embedding_scale)


@torch.no_grad()
def redraw(maker: Generator, server: Server, scale: float) -> None:
    stream = generator(server.settings.seed, "embeddings", server.round)
    table = maker.network.embedding.weight
    table.copy_(torch.randn(table.shape, generator=stream)).mul_(scale)


@dataclass(frozen=True)
class Collect(Part):
    """Collect every client's mean latent vector, and build the hypernetwork with them."""

    generation: Generation

    def __call__(self, server: Server) -> Exchange[None]:
        ids = [info.id for info in server.clients]
        dimension = self.generation.dimension(len(ids))
        payload = Payload(extras={"dimension": dimension})
        replies = yield Request(REQUEST, dict.fromkeys(ids, payload))
        vectors = {reply.client: reply.extras[REQUEST] for reply in replies}
        embeddings = standardised(vectors, ids, dimension)
        server.memory[MEMORY] = self.generation.built(server, embeddings)


@dataclass(frozen=True)
class LatentShape:
    """The shape of a mean latent vector."""

    generation: Generation

    def __call__(self, context: RequestContext) -> tuple[int, ...]:
        return (self.generation.dimension(len(context.server.clients)),)


def standardised(vectors: dict[str, Tensor], ids: list[str], dimension: int) -> Tensor:
    """Return one row per client with mean 0 and variance 1 over clients; a client without a valid vector gets the mean."""
    silent = [client for client in ids if client not in vectors]
    if silent:
        log.warning("No valid latent vector from %s; using the mean of the others.", ", ".join(silent))
    table = torch.zeros(len(ids), dimension)
    if vectors:
        known = torch.stack(list(vectors.values()))
        spread = known.std(dim=0, correction=0)
        scale = torch.where(spread > 0, spread, 1.0)
        for client, vector in vectors.items():
            table[ids.index(client)] = (vector - known.mean(dim=0)) / scale
    return table


@dataclass(frozen=True)
class Describe(Part):
    """Train the shared auto-encoder, and reply with the mean latent vector."""

    epochs: int

    def __call__(self, client: Client, payload: Payload) -> Payload:
        train, validation = client.data.train, client.data.validation
        chosen = torch.randperm(len(train), generator=client.generator)[:IMAGES]
        images = pixels(train.batch(chosen)[0], client.id)
        with default_stream(client.bench.settings.seed, "autoencoder"):
            encoder = AutoEncoder((images.shape[1], SIDE, SIDE), int(payload.extras["dimension"]))
        fit(encoder, images, self.epochs, client.generator)
        return Payload(
            extras={REQUEST: mean_latent(encoder, validation if validation is not None and len(validation) else train, client.id)}
        )


def pixels(x: Tensor, client: str) -> Tensor:
    """Return images in [0, 1], resized for the auto-encoder."""
    if x.dim() != 4 or (x.is_floating_point() and not 0 <= float(x.min()) <= float(x.max()) <= 1):
        raise DataError(
            f"Client {client}: embeddings from the auto-encoder need images with values of 0 to 255 (uint8) or 0 to 1, "
            f'got {x.dtype} of shape {tuple(x.shape)}. Use embedding="learnt".'
        )
    x = x if x.is_floating_point() else x.to(torch.float32) / 255
    if tuple(x.shape[2:]) == (SIDE, SIDE):
        return x
    return nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True).clamp(0, 1)


def fit(encoder: AutoEncoder, images: Tensor, epochs: int, stream: torch.Generator) -> None:
    optimizer = torch.optim.Adam(encoder.parameters(), lr=LR)
    for _ in range(epochs):
        for chunk in torch.split(torch.randperm(len(images), generator=stream), BATCH):
            loss = nn.functional.mse_loss(encoder(images[chunk]), images[chunk])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def mean_latent(encoder: AutoEncoder, examples: Examples, client: str) -> Tensor:
    total = sum(encoder.encode(pixels(x, client)).sum(dim=0) for x, _ in in_batches(examples, 256))
    return torch.as_tensor(total) / len(examples)


@register(shared_options=HYPERNETWORK_OPTIONS)
def hfedf(  # noqa: D417 (the other options: HYPERNETWORK_OPTIONS)
    server_lr: float = 1e-3,
    server_weight_decay: float = 1e-5,
    gradalign: bool = True,
    ema: bool = True,
    ema_alpha: float = 0.95,
    warmup: int = 10,
    embedding: str = "learnt",
    embedding_dim: int = 0,
    embedding_scale: float = 1.0,
    embedding_epochs: int = 50,
    generate: str = "all",
    head_init: str = "initial",
    width: int = 50,
    server_optimizer: str = "adam",
    server_momentum: float = 0.9,
    server_eps: float = 1e-8,
    trunk_rate: float = 1.0,
    server_clip: float = 0.0,
    memory_share: float = 0.5,
) -> Method:
    """Generate every client's model with a hypernetwork that is trained on all clients jointly.

        phi_i = h(nu_i; theta)                        sent to client i, which trains and returns phi_i'
        g_i   = J_i^T (phi_i - phi_i')                gradient with respect to (theta, nu)
        w     = softmax_i( cos(g_i, mean_j g_j) )     GradAlign
        (theta, nu) <- Adam step along sum_i w_i g_i
        round t > W:  (theta, nu) <- a (theta, nu) + (1 - a) ema,   ema <- (theta, nu);   ema starts in round W

    Args:
        gradalign: weight clients by the agreement of their gradients with the mean; False: equally.
        ema: smooth the hypernetwork by a moving average.
        ema_alpha: a: weight of the new state in the average.
        warmup: W: round in which the average starts.
        embedding: learnt (trained); random: redrawn after every round; autoencoder: trained on images before round 1, then fixed.
        embedding_epochs: epochs of the auto-encoder.

    Reference:
        M. Bartholet, T. Kim, A. Beuret, S.-Y. Yun and J. M. Buhmann. Non-linear Fusion in Federated Learning: A Hypernetwork
        Approach to Federated Domain Generalization. 2024.
    """
    if not 0 < ema_alpha <= 1 or warmup < 1 or embedding_epochs < 1:
        raise OptionError(
            "hfedf: ema_alpha must be between 0 and 1, warmup and embedding_epochs must be at least 1, "
            f"got ema_alpha={ema_alpha}, warmup={warmup}, embedding_epochs={embedding_epochs}."
        )
    if embedding == "autoencoder" and embedding_scale != 1:
        raise OptionError("hfedf: auto-encoder embeddings are standardised, so embedding_scale has no effect. Remove it.")
    step = ServerOptimizer(
        "hfedf", server_optimizer, server_lr, server_weight_decay, server_momentum, server_clip, server_eps, trunk_rate
    )
    generation = Generation(
        "hfedf", step, generate, embedding, embedding_dim, embedding_scale, head_init, width, memory_share, int(ema)
    )
    joint = JointRound(generation, gradalign, ema_alpha if ema else None, warmup)
    if embedding != "autoencoder":
        return generating_method(generation, joint)
    return generating_method(
        generation,
        joint,
        "the mean latent vector of its images, once",
        "aggregate",
        setup=(Collect(generation),),
        answers={REQUEST: Describe(embedding_epochs)},
        reply_extras={REQUEST: {REQUEST: Array(LatentShape(generation))}},
    )
