"""FedDG-GA: client weights from generalisation gaps. Differences from the paper: docs/methods/feddg_ga.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.data_types import in_batches
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.rounds import Exchange, Reply, standard_round
from polyfed.core.server import Server
from polyfed.errors import DataError, OptionError
from polyfed.extras import Number
from polyfed.methods._shared import require_choice

KEY = "feddg_ga"
BEFORE, AFTER = "feddg_ga_averaged", "feddg_ga_own"
LARGEST_LOSS = 1e9
METRICS = ("loss", "accuracy")
# Keeps the mean defined if all clients of a round have weight 0; negligible compared with any other weight.
FLOOR = 1e-9


@torch.no_grad()
def badness(client: Client, metric: str) -> float:
    """Return the loss, or the error rate, of the current model on the client's validation data."""
    validation, bench = client.data.validation, client.bench
    if validation is None or not len(validation):
        raise DataError(
            f"Client {client.id} has no validation data, which feddg_ga needs. Use a data set or a partition with a validation part."
        )
    modes = {module: module.training for module in bench.model.modules()}
    bench.model.eval()
    total = 0.0
    for x, y in in_batches(validation, bench.settings.test_batch_size):
        y = bench.task.for_loss(y.to(bench.device))
        logits = bench.model(bench.preparation.for_testing(x.to(bench.device)))
        total += float((logits.argmax(1) != y).sum()) if metric == "accuracy" else float(bench.loss(logits, y)) * len(y)
    for module, training in modes.items():
        module.training = training
    return total / len(validation)


@dataclass(frozen=True)
class Report(Part):
    """Score the model on the client's validation data and send the number."""

    name: str
    metric: str
    runs_evaluation = True

    def __call__(self, client: Client) -> dict[str, float]:
        return {self.name: badness(client, self.metric)}


def adjusted(weights: Mapping[str, float], gaps: Mapping[str, float], step: float, center: bool) -> dict[str, float]:
    mean = sum(gaps.values()) / len(gaps) if center and gaps else 0.0
    moved = {client: gap - mean for client, gap in gaps.items()}
    largest = max((abs(move) for move in moved.values()), default=0.0)
    # Equal gaps differ from their mean only by rounding, which must not be scaled up to a full step.
    if largest <= 1e-9 * max((abs(gap) for gap in gaps.values()), default=0.0):
        return dict(weights)
    share = step / len(weights) / largest
    clipped = {client: min(max(weight + share * moved.get(client, 0.0), 0.0), 1.0) for client, weight in weights.items()}
    total = sum(clipped.values())
    return {client: weight / total for client, weight in clipped.items()} if total > 0 else dict(weights)


def saved_state(server: Server) -> dict[str, Any]:
    """Return the weights, and the last score that each client reported for its own model, with the round."""
    share = 1 / len(server.clients)
    return server.persistent(KEY, lambda: {"weights": {info.id: share for info in server.clients}, "own": {}, "round": {}})


@dataclass(frozen=True)
class AdjustedRound(Part):
    """Run the standard round, but first update the weights by the gaps of the previous round, which the replies complete."""

    step: float
    center: bool
    uses = standard_round.uses

    def __call__(self, server: Server) -> Exchange[None]:
        replies = list((yield server.request("train", server.sample_clients())))
        counted = {reply.client: reply.extras for reply in replies if server.validated_entries(reply) is not None}
        server.memory[KEY] = self.updated(server, saved_state(server), counted)
        server.aggregate(reply for reply in replies if reply.client in counted)

    def updated(self, server: Server, old: Mapping[str, Any], extras: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the weights updated by these scores, and the scores of the clients' own models for the next update."""
        last = server.round - 1
        gaps = {c: losses[BEFORE] - old["own"][c] for c, losses in extras.items() if old["round"].get(c) == last}
        step = self.step * (1 - (last - 1) / server.rounds)
        return {
            "weights": adjusted(old["weights"], gaps, step, self.center),
            "own": {**old["own"], **{client: losses[AFTER] for client, losses in extras.items()}},
            "round": {**old["round"], **dict.fromkeys(extras, server.round)},
        }


def adjusted_weight(server: Server, reply: Reply) -> float:
    weight: float = saved_state(server)["weights"][reply.client]
    return max(weight, FLOOR)


def equal_weight(server: Server, reply: Reply) -> float:
    return 1.0


@register(shows=("step",))
def feddg_ga(step: float = 0.2, center: bool = True, metric: str = "loss") -> Method:
    """Increase the weights of the clients whose validation scores averaging reduces most.

        gap_k = loss of the averaged model on val_k - loss of client k's own model, before averaging, on val_k
        a_k  <- a_k + s_t / K * (gap_k - mean gap) / max_j |gap_j - mean gap|       clipped to [0, 1], then divided by the sum
        theta <- sum_k a_k theta_k

        a_k starts at 1/K;  s_t = step * (1 - (t - 1) / T)

    Args:
        step: largest change of a weight in round 1, times 1/K; it decreases to 0 over the rounds. 0 is FedAvg with equal weights.
        center: subtract the mean gap, as published; False: as in the authors' code.
        metric: loss or accuracy.

    Reference:
        R. Zhang et al. Federated Domain Generalization with Generalization Adjustment. CVPR 2023.
    """
    if not 0 <= step <= 1:
        raise OptionError(f"feddg_ga: step must be between 0 and 1, got {step}.")
    require_choice("feddg_ga", "metric", metric, METRICS)
    if step == 0:
        return Method(KEY, weighting=equal_weight)
    return Method(
        KEY,
        before_training=(Report(BEFORE, metric),),
        after_training=(Report(AFTER, metric),),
        reply_extras={"train": dict.fromkeys((BEFORE, AFTER), Number(0, 1 if metric == "accuracy" else LARGEST_LOSS))},
        round=AdjustedRound(step, center),
        weighting=adjusted_weight,
        facts=Facts(
            class_labels=metric == "accuracy",
            data_derived_uploads="two validation scores per client and round",
            granularity="aggregate",
            extra_work="two passes over the validation data per round",
        ),
    )
