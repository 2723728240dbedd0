"""FixBN: frozen batch-norm statistics after half of the rounds. Differences from the paper: docs/methods/fixbn.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.entries import BatchNorm, estimate_statistics
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declare
from polyfed.core.reducers import Reduction
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Exchange, Payload, Replies, standard_round
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, Select, bn_affine, bn_statistics
from polyfed.core.workbench import Workbench
from polyfed.errors import ModelError, OptionError, TooFewReplies
from polyfed.methods._shared import require_choice

STATISTICS_REQUEST = "batch_norm_statistics"
FROZEN: dict[str, tuple[Select, ...]] = {
    "statistics": (bn_statistics,),
    "affine": (bn_affine,),
    "both": (bn_statistics, bn_affine),
    "nothing": (),
}
STAGE_ONE = ("fedavg", "decoupled")


def last_round(at: int | float, rounds: int) -> int:
    """Return the last round before ``at``, which is a round or a fraction of all rounds."""
    return Rule(bn_statistics, since=at).starts_after(rounds)


def measure_statistics(client: Client, payload: Payload) -> Payload:
    """Pass this round's batches through the received model without training, and return the new statistics."""
    client.receive(payload.entries)
    estimate_statistics(client.model, (x for x, _ in client.batches()), "moving")
    names = [name for name in client.phase.up if bn_statistics.matches(client.bench.plan.entries[name])]
    return Payload({name: client.bench.live[name].detach().clone() for name in names})


def uploaded_statistics(context: RequestContext) -> list[str]:
    return [name for name in context.plan.at(context.request.round).up if bn_statistics.matches(context.plan.entries[name])]


def averaged_statistics(server: Server, replies: Replies) -> dict[str, Tensor]:
    known = server.plan.entries
    names = [name for name in server.phase.up if bn_statistics.matches(known[name])]
    groups = {reducer: [name for name in group if name in names] for reducer, group in server.phase.groups.items()}
    reduction = Reduction(groups, server.state)
    for reply in replies:
        reduction.add(reply.entries, server.weight(reply))
    return server.cast_to_plan(reduction.finish())


@dataclass(frozen=True)
class Decoupled(Part):
    """Until round T*, average statistics before clients train with them; then run the standard round."""

    at: int | float
    uses = standard_round.uses

    def __call__(self, server: Server) -> Exchange[None]:
        before = server.state
        if server.round <= last_round(self.at, server.rounds):
            replies = yield server.request(STATISTICS_REQUEST, server.sample_clients())
            server.state = before | averaged_statistics(server, replies)
        try:
            yield from standard_round(server)
        except TooFewReplies:
            # A retried round must start from the same state.
            server.state = before
            raise


@dataclass(frozen=True)
class FreezeStatistics(Part):
    """Normalise with the received statistics, without updating them, after round T*."""

    at: int | float
    reads_data = False

    def __call__(self, client: Client) -> None:
        if client.round > last_round(self.at, client.rounds):
            for module in client.model.modules():
                if isinstance(module, BatchNorm):
                    module.eval()

    def frozen_after(self, rounds: int) -> int:
        """Return the last round in which statistics change."""
        return last_round(self.at, rounds)

    def check(self, bench: Workbench) -> None:
        """Require running statistics in every batch norm, and a freeze within the run."""
        for path, module in bench.model.named_modules():
            if isinstance(module, BatchNorm) and not module.track_running_stats:
                raise ModelError(
                    f"fixbn: the batch norm {path} keeps no running statistics, so there is nothing to freeze. Build it with track_running_stats=True."
                )
        require_freeze_in_run(self.at, bench)

    def notice(self, bench: Workbench, clients: int) -> str:
        """Warn about a constant learning rate, which can diverge, and a freeze before round 1, which freezes initial values."""
        rounds = bench.settings.rounds
        if last_round(self.at, rounds) == 0:
            return (
                f"fixbn freezes the initial statistics (mean 0, variance 1), because the freeze is before round 1 of {rounds}. "
                "Use more rounds, or a later freeze_at."
            )
        freezes = last_round(self.at, rounds) < rounds
        if not freezes or bench.method.schedule is not None or bench.settings.schedule != "constant":
            return ""
        return (
            "fixbn freezes statistics at a constant learning rate, which can diverge. The paper decays the rate at the same round: "
            "remove decay=None."
        )


@dataclass(frozen=True)
class DecayAtFreeze(Part):
    """Multiply the learning rate by a factor after round T*, and again half-way between T* and the end."""

    at: int | float
    factor: float

    def __call__(self, round_number: int, rounds: int) -> float:
        freeze = last_round(self.at, rounds)
        passed = sum(0 < after < round_number for after in (freeze, (freeze + rounds) // 2))
        return math.pow(self.factor, passed)


@dataclass(frozen=True)
class FreezeAffine(Part):
    """Keep the received scale and shift of batch norm after round T*: no gradient, no weight decay, no momentum."""

    at: int | float
    reads_data = False

    def __call__(self, client: Client) -> None:
        frozen = client.round > last_round(self.at, client.rounds)
        for parameter in affine_parameters(client.bench):
            parameter.requires_grad_(not frozen)

    def check(self, bench: Workbench) -> None:
        require_freeze_in_run(self.at, bench)


@declare(reads_data=False)
def release_affine(client: Client) -> None:
    for parameter in affine_parameters(client.bench):
        parameter.requires_grad_(True)


def affine_parameters(bench: Workbench) -> list[nn.Parameter]:
    return [parameter for name, parameter in bench.parameters.items() if bn_affine.matches(bench.plan.entries[name])]


def require_freeze_in_run(at: int | float, bench: Workbench) -> None:
    """Reject a freeze after the last round, which would have no effect."""
    if last_round(at, bench.settings.rounds) > bench.settings.rounds:
        raise OptionError(
            f"fixbn: freeze_at is round {at}, but the run has {bench.settings.rounds} rounds. Use an earlier round, or a fraction such as 0.5."
        )


@register(shows=("freeze_at", "decay"), absent={"decay": None})
def fixbn(freeze_at: int | float = 0.5, freeze: str = "statistics", stage_one: str = "fedavg", decay: float | None = 0.1) -> Method:
    """Freeze the averaged batch-norm statistics half-way, and continue to train with them.

        rounds 1 … T*:      FedAvg;  S* = (μ*, σ²*) = Σ_k p_k S_k after round T*
        rounds T*+1 … T:    y = γ (x − μ*) / sqrt(σ²* + ε) + β      in training and in testing; γ and β still learn and are averaged
        learning rate:      × decay after round T*, and × decay again after round ⌊(T* + T) / 2⌋

    Args:
        freeze_at: the last round before the freeze: an integer, or a fraction of all rounds; 1.0 never freezes.
        freeze: statistics, affine, both or nothing (Table H).
        stage_one: rounds before the freeze: fedavg, or decoupled (average the statistics before training the weights with them).
        decay: factor on the learning rate after the freeze, and again half-way between the freeze and the end; a decay before round
        1 is skipped, and a --schedule other than constant disables it. None: no decay.

    Reference:
        J. Zhong, H.-Y. Chen and W.-L. Chao. Making Batch Normalization Great in Federated Deep Learning. 2023.
    """
    _refuse_options(freeze_at, freeze, stage_one, decay)
    neutral = freeze_at == 1.0 and isinstance(freeze_at, float)
    frozen = () if neutral else FROZEN[freeze]
    decoupled = stage_one == "decoupled"
    before: list[FreezeStatistics | FreezeAffine] = []
    if decoupled or bn_statistics in frozen:
        before.append(FreezeStatistics(0 if decoupled else freeze_at))
    if bn_affine in frozen:
        before.append(FreezeAffine(freeze_at))
    return Method(
        "fixbn",
        sharing=tuple(Rule(select, up=False, since=freeze_at) for select in frozen),
        before_training=tuple(before),
        schedule=None if neutral or decay is None else DecayAtFreeze(freeze_at, decay),
        after_training=(release_affine,) if bn_affine in frozen else (),
        round=Decoupled(freeze_at) if decoupled else None,
        answers={STATISTICS_REQUEST: measure_statistics} if decoupled else {},
        reply_entries={STATISTICS_REQUEST: uploaded_statistics} if decoupled else {},
        facts=Facts(batch_norm=True, messages="2 until the freeze" if decoupled else "1"),
    )


def _refuse_options(freeze_at: int | float, freeze: str, stage_one: str, decay: float | None) -> None:
    if isinstance(freeze_at, bool) or not isinstance(freeze_at, int | float) or freeze_at < 0:
        raise OptionError(f"fixbn: freeze_at must be a round (60) or a fraction of all rounds (0.5), got {freeze_at!r}.")
    if isinstance(freeze_at, float) and freeze_at > 1:
        raise OptionError(
            f"fixbn: freeze_at as a fraction must be between 0.0 and 1.0, got {freeze_at}. Write a round as an integer."
        )
    if decay is not None and (isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1):
        raise OptionError(f"fixbn: decay must be a factor above 0 and at most 1, or None, got {decay!r}.")
    require_choice("fixbn", "freeze", freeze, FROZEN)
    require_choice("fixbn", "stage_one", stage_one, STAGE_ONE)
    if stage_one == "decoupled" and freeze in ("affine", "nothing"):
        raise OptionError(
            f'fixbn: stage_one="decoupled" needs freeze="statistics" or "both", got {freeze!r}. To decouple in all rounds, use freeze_at=1.0.'
        )
