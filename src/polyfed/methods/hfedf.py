"""hFedF: a hypernetwork on the server makes every client's model; all clients' gradients through it are aligned and smoothed.

    phi_i = h(nu_i; theta)                            sent to client i, which trains and returns phi_i'
    g_i   = J_i^T (phi_i - phi_i')                    gradient with respect to (theta, nu)
    w     = softmax_i( cos(g_i, mean_j g_j) )         GradAlign
    (theta, nu) <- Adam step along sum_i w_i g_i
    round t > W:  (theta, nu) <- a (theta, nu) + (1 - a) ema,   ema <- (theta, nu);   ema starts in round W

Reference: Bartholet et al., Non-linear Fusion in Federated Learning: A Hypernetwork Approach to Federated Domain Generalization, 2024.

Differences from the paper:
* The sign: Algorithm 1 takes returned - sent and then descends along it, which would climb; here delta = sent - returned.
* The exponent: Eq. 9 has exp(-cosine), while section 3.4, Algorithm 3 and A.1.1 give more weight to the more similar; here exp(+cosine).
* Moving average: Eq. 10 smooths theta, Algorithm 1 theta and nu, with indices a round apart; here one recurrence over both. As the live parameters are
  replaced by the average, the average is the last round's state: no copy is kept between rounds.
* Heads start with the model's own initial values as biases (``head_init="match"``: with their mean and spread only, ``"default"``: as torch does).
  Otherwise all of a client's model hangs on its z, and a step of the small trunk, whose gradient sums over all weights, can blow it up or shrink it to nothing.
* Batch-norm statistics and counters, which nothing can generate, stay at the client; affine parameters are generated.
* ``generate`` limits generation to some entries, the rest being averaged (the paper's future work).

Defaults: server_lr, server_weight_decay, ema_alpha from Table 10, PACS (Office-Home 1e-3, 1e-5, 0.75; VLCS 1e-3, 1e-3, 0.75); network from Table 8;
embedding_dim floor(1 + N/4) from 4.1. Not printed, our choice: warmup, the auto-encoder's epochs, embeddings drawn with deviation 1 (torch's default).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from polyfed.core.conversation import Talk
from polyfed.core.extras import Array
from polyfed.core.method import Method, register
from polyfed.core.seeds import generator
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.methods._shared.autoencoder_embeddings import QUESTION, Collect, Describe, LatentShape
from polyfed.methods._shared.generated_weights import (
    HYPERNETWORK_OPTIONS,
    USED_SLOTS,
    Generation,
    ServerOptimizer,
    generating_method,
)
from polyfed.methods._shared.hypernetwork import Generator

log = logging.getLogger("polyfed")


@dataclass(frozen=True)
class JointRound:
    """All clients train on their generated models; the hypernetwork takes one step along their combined gradient."""

    generation: Generation
    align: bool
    ema_alpha: float | None
    warmup: int
    uses = USED_SLOTS

    def __call__(self, server: Server) -> Talk[None]:
        ask = server.ask("train", server.sample())
        replies = yield ask
        deltas = self.generation.absorbed(server, ask, replies)
        maker = self.generation.generator(server)
        weights = maker.learn(deltas, self.align, self.ema_alpha if server.round > self.warmup else None)
        log.debug("Round %d: weights %s.", server.round, dict(zip(deltas, weights.tolist(), strict=True)))
        server.note("alignment_weight", dict(zip(deltas, weights.tolist(), strict=True)))
        server.note("embedding", maker.embeddings())
        if self.generation.embedding == "random":
            redraw(maker, server, self.generation.embedding_scale)

    def check(self, bench: Workbench) -> None:
        """Something must be left to generate."""
        self.generation.check(bench)

    def notice(self, bench: Workbench, clients: int) -> str:
        """The size of the hypernetwork, said before it is built."""
        return self.generation.notice(bench, clients)


@torch.no_grad()
def redraw(maker: Generator, server: Server, scale: float) -> None:
    """Give every client a new random embedding."""
    stream = generator(server.settings.seed, "embeddings", server.round)
    table = maker.network.embedding.weight
    table.copy_(torch.randn(table.shape, generator=stream)).mul_(scale)


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
    """Make every client's model by a hypernetwork, learnt from all clients at once.

    Args:
        gradalign: weigh clients by how well their gradients agree with the mean, else equally.
        ema: smooth the hypernetwork by a moving average.
        ema_alpha: share of the new state in the average.
        warmup: round in which the average starts.
        embedding: learnt; random: drawn again after every round; autoencoder: learnt from images before round 1, then fixed.
        embedding_epochs: epochs of the auto-encoder.
    """
    if not 0 < ema_alpha <= 1 or warmup < 1 or embedding_epochs < 1:
        raise OptionError(
            "hfedf: ema_alpha must lie between 0 and 1, warmup and embedding_epochs must be at least 1, "
            f"found ema_alpha={ema_alpha}, warmup={warmup}, embedding_epochs={embedding_epochs}."
        )
    if embedding == "autoencoder" and embedding_scale != 1:
        raise OptionError(
            "hfedf: embeddings of the auto-encoder are standardised, so embedding_scale would be ignored. Leave it out."
        )
    step = ServerOptimizer(
        "hfedf", server_optimizer, server_lr, server_weight_decay, server_momentum, server_clip, server_eps, trunk_rate
    )
    generation = Generation(
        "hfedf", step, generate, embedding, embedding_dim, embedding_scale, head_init, width, memory_share, int(ema)
    )
    hold = JointRound(generation, gradalign, ema_alpha if ema else None, warmup)
    if embedding != "autoencoder":
        return generating_method(generation, hold)
    answers = {QUESTION: Describe(embedding_epochs)}
    latent = {QUESTION: {QUESTION: Array(LatentShape(generation))}}
    return generating_method(
        generation, hold, (Collect(generation),), answers, latent, "the mean latent vector of its images, once", "aggregate"
    )
