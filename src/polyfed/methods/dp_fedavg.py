"""DP-FedAvg: client-level differential privacy. Differences from the paper: docs/methods/dp_fedavg.md."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.entries import MOMENTUM, Entry
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import declared
from polyfed.core.privacy import ACCOUNTS, uncovered
from polyfed.core.reducers import Largest, Mean
from polyfed.core.replies import least
from polyfed.core.rounds import Reply
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import Declined, JoinError, OptionError
from polyfed.extras import Number
from polyfed.methods._shared import require_choice
from polyfed.methods._shared.privacy_budget import (
    ACCOUNT,
    ACCOUNT_UPLOADS,
    MAX_CLIP,
    MIN_CLIP,
    SYSTEM,
    Account,
    Budget,
    NoteSpent,
    Randomness,
    RequireBudget,
    clip_problem,
    note_accounts,
    require_budget,
    require_clip,
)
from polyfed.models.layers.sample_gradients import gradient_samplers

log = logging.getLogger("polyfed")

MEMORY, CLIP, BELOW = "dp_fedavg", "dp_fedavg_clip", "dp_fedavg_below"
LEARNING_RATE, SHARE_OF_NOISE = 0.2, 20
FEWEST_BELOW, MAX_BELOW = -1e6, 1e6


@dataclass(frozen=True)
class Noise(Account):
    """Noise levels. ``first`` is the clip of round 1."""

    first: float = 1.0
    adaptive: bool = False
    quantile: float = 0.5
    at: str = "server"

    def combined(self, rounds: int) -> float:
        """Return z, the noise multiplier of a round for the accountant."""
        return self.budget.multiplier(1.0, self.rounds or rounds)

    def on_share(self, rounds: int, clients: int) -> float:
        """Return s_b, the noise on the number of clients below the clip."""
        return max(clients / SHARE_OF_NOISE, 2 * self.combined(rounds))

    def on_update(self, rounds: int, clients: int) -> float:
        """Return z_d, the noise on updates, as a multiple of the clip."""
        z = self.combined(rounds)
        return (z**-2 - self.on_share(rounds, clients) ** -2) ** -0.5 if self.adaptive else z

    def clip(self, server: Server) -> float:
        found: Mapping[str, float] = server.persistent(MEMORY, lambda: {"clip": self.first})
        return found["clip"]

    def at_server(self, server: Server, *names: str) -> Randomness:
        return Randomness(self.noise, server.settings.seed, (MEMORY, server.round, *names))


def changes(client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the client's update: uploaded minus received values."""
    return {name: value - client.received[name] for name, value in entries.items() if value.is_floating_point()}


def clamped(entry: Entry, value: Tensor) -> Tensor:
    """Clamp a noisy value to the minimum of its entry, because noise must not make a variance negative."""
    return value.clamp_min(least(entry))


def length(update: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in update.values()))


def received_clip(client: Client) -> float:
    """Return S, the clip that the server sent for this round. Decline an invalid clip."""
    clip = float(client.extras[CLIP])
    if problem := clip_problem(clip):
        raise Declined(f"Client {client.id} does not take part in round {client.round}: invalid clip from the server ({problem}).")
    return clip


def require_valid_clip(client: Client) -> None:
    """Decline an invalid clip before the client trains and charges its privacy ledger."""
    received_clip(client)


def finite(client: Client, update: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the update, or zeros if its norm is not finite: no noise would cover it, and declining would leak information."""
    if math.isfinite(length(update)):
        return update
    log.warning("Client %s, round %d: its update is not finite and is replaced by zeros.", client.id, client.round)
    return {name: torch.zeros_like(value) for name, value in update.items()}


@dataclass(frozen=True)
class ClipUpdate(Noise):
    """Clip the update of a client, and add noise if clients add it."""

    stage = "clip"

    def __call__(self, client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        largest, update = received_clip(client), finite(client, changes(client, entries))
        factor = min(1.0, largest / max(length(update), 1e-30))
        chance = self.randomness(client, "update")
        spread = largest * self.on_update(client.rounds, 1) if self.at == "client" else 0.0
        found = dict(entries)
        for name, value in update.items():
            clipped = factor * value
            noisy = chance.add_noise(clipped, spread) if spread else clipped
            found[name] = clamped(client.bench.plan.entries[name], client.received[name] + noisy)
        return found

    def check(self, bench: Workbench) -> None:
        """Check that everything that is uploaded is part of the clipped update."""
        gradient_samplers()
        entries = bench.plan.entries
        for phase in bench.plan.phases.values():
            for name in phase.up:
                if entries[name].kind == MOMENTUM or (entries[name].dtype.is_floating_point and name not in phase.down):
                    raise JoinError(
                        f"{bench.method}: {name} is uploaded but not sent down, so dp_fedavg cannot clip its change. "
                        "Use parts that share it both ways, or keep it local."
                    )
            if self.at == "server" and any(not isinstance(reducer, Mean | Largest) for reducer in phase.groups):
                raise JoinError(
                    f"{bench.method}: dp_fedavg adds noise to a mean at the server, but another part reduces updates differently. "
                    'Use dp_fedavg(noise_at="client").'
                )
        if self.at == "server":
            refuse_compression(bench)
        if bench.method.outgoing is not None or bench.method.receiving:
            raise JoinError(
                f"{bench.method}: dp_fedavg clips changes relative to the state from the server, but another part changes the initial client state. Remove it."
            )

    def notice(self, bench: Workbench, clients: int) -> str:
        said = [f"{row.what} ({row.why})" for row in uncovered(bench.method, bench.settings, bench.plan)]
        words = [f"dp_fedavg does not cover: {'; '.join(said)}."] if said else []
        if self.noise != SYSTEM:
            words.append(
                'dp_fedavg draws its noise from the run\'s seed, so anyone who knows the seed can remove it. For real data, use noise="system".'
            )
        return " ".join(words)


def refuse_compression(bench: Workbench) -> None:
    """Reject compression after clipping: rounding and residuals of earlier rounds can exceed the clip."""
    for part in bench.method.parts:
        if any(declared(change).stage == "compress" for change in part.uploads):
            raise JoinError(
                f"{bench.method}: {part.name} changes updates after dp_fedavg has clipped them, so the noise of the server would not cover "
                f'them. Remove {part.name}, or use dp_fedavg(noise_at="client"), which adds the noise earlier.'
            )


@dataclass(frozen=True)
class ReportBelowClip(Noise):
    """Report whether the update is within the clip: 1/2 or -1/2, with noise if clients add it."""

    def __call__(self, client: Client) -> dict[str, float]:
        live = client.bench.live
        update = changes(client, {name: live[name].detach() for name in client.phase.up if name in live})
        below = 0.5 if length(update) <= received_clip(client) else -0.5
        if self.at == "client":
            spread = self.on_share(client.rounds, 1)
            below = float(self.randomness(client, "below").add_noise(torch.tensor(below, dtype=torch.float64), spread))
        return {BELOW: below}


@dataclass(frozen=True)
class SendClip(Noise):
    """Send S, the clip, with the training request."""

    def __call__(self, server: Server, _: str) -> float:
        return self.clip(server)


@dataclass(frozen=True)
class MoveClip(Noise):
    """Adapt S towards the quantile of the update norms."""

    def __call__(self, server: Server, extras: Mapping[str, Mapping[str, Any]]) -> None:
        if not extras:
            return
        total = sum(float(sent[BELOW]) for sent in extras.values())
        if self.at == "server":
            spread = self.on_share(server.rounds, len(extras))
            total = float(self.at_server(server, "below").add_noise(torch.tensor(total, dtype=torch.float64), spread))
        share = min(max(total / len(extras) + 0.5, -1.0), 2.0)  # bounds the effect of noise and of a faulty client
        moved = self.clip(server) * math.exp(-LEARNING_RATE * (share - self.quantile))
        server.memory[MEMORY] = {"clip": min(max(moved, MIN_CLIP), MAX_CLIP)}


def equal_weight(_: Server, __: Reply) -> float:
    """Return the same weight for every client, so that the influence of one client on the mean is known."""
    return 1.0


@dataclass(frozen=True)
class AddNoise(Noise):
    """Add noise to the mean of clipped updates."""

    def __call__(self, server: Server, aggregate: dict[str, Tensor]) -> dict[str, Tensor]:
        answered = server.num_aggregated
        spread = self.clip(server) * self.on_update(server.rounds, answered) / answered
        chance = self.at_server(server, "mean")
        entries = server.plan.entries
        return {
            name: clamped(entries[name], chance.add_noise(value, spread)) if value.is_floating_point() else value
            for name, value in aggregate.items()
        }


@register(shows=("epsilon",))
def dp_fedavg(
    epsilon: float = 8.0,
    delta: float = 1e-5,
    clip: float = 1.0,
    adaptive: bool = True,
    quantile: float = 0.5,
    noise_at: str = "server",
    noise: str = "seed",
    planned_rounds: int = 0,
) -> Method:
    """Protect clients with differential privacy: clip whole updates, and add noise.

        d_k <- d_k min(1, S / ||d_k||),   d_k = change of all entries that client k uploads
        noise_at="server":  state + mean_k d_k + Normal(0, (z S / m)^2 I)         m = number of replies, each with weight 1
        noise_at="client":  state + mean_k (d_k + Normal(0, (z S)^2 I))           d_k is hidden from everyone, including the server
        adaptive:           S <- S exp(-0.2 (b - quantile)),  b = noisy fraction of clients with ||d_k|| <= S
        z_d = (z^-2 - s_b^-2)^-1/2,   s_b = max(m / 20, 2 z)                      z_d replaces z above if S is adaptive; s_b: noise on b

    Args:
        epsilon: privacy budget per client for the whole run.
        delta: probability with which the guarantee may fail; well below 1 / (number of clients).
        clip: largest norm of an update; if adaptive, in round 1.
        adaptive: let the clip follow a quantile of the update norms.
        quantile: target fraction of updates below the clip.
        noise_at: server (which sees updates without noise), or client.
        noise: seed (reproducible, for studies) or system (the secure generator of the operating system).
        planned_rounds: number of rounds that the budget must cover, after which a client stops; 0: all rounds.

    Reference:
        H. B. McMahan et al. Learning Differentially Private Recurrent Language Models. ICLR 2018.
        G. Andrew et al. Differentially Private Learning with Adaptive Clipping. NeurIPS 2021.
    """
    require_budget("dp_fedavg", epsilon, delta, noise, planned_rounds)
    require_choice("dp_fedavg", "noise_at", noise_at, ("server", "client"))
    require_clip("dp_fedavg", clip)
    if not 0 < quantile < 1:
        raise OptionError(f"dp_fedavg: quantile must be between 0 and 1, got {quantile}.")
    account = (Budget(epsilon, delta), planned_rounds, noise, MEMORY, True)
    how = (float(clip), bool(adaptive), float(quantile), noise_at)
    below = {BELOW: Number(FEWEST_BELOW, MAX_BELOW)} if adaptive else {}
    return Method(
        "dp_fedavg",
        before_training=(require_valid_clip, RequireBudget(*account)),
        after_training=(NoteSpent(*account), *((ReportBelowClip(*account, *how),) if adaptive else ())),
        uploads=(ClipUpdate(*account, *how),),
        send_extras={CLIP: SendClip(*account, *how)},
        reply_extras={"train": {ACCOUNTS: ACCOUNT, **below}},
        weighting=equal_weight,
        server_step=AddNoise(*account, *how) if noise_at == "server" else None,
        after_round=(note_accounts, *((MoveClip(*account, *how),) if adaptive else ())),
        facts=Facts(
            client_state=True,
            data_derived_uploads=ACCOUNT_UPLOADS + (", and whether its update was within the clip, with noise" if adaptive else ""),
            granularity="aggregate",
            extra_work="one norm and noise per round",
            protects="clients",
            noise_at="server" if noise_at == "server" else "client",
            noise_from="system" if noise == SYSTEM else "seed",
            epsilon=float(epsilon),
            delta=float(delta),
            withholds_loss=True,
        ),
    )
