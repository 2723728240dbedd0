"""FedNova: normalised averaging. Differences from the paper: docs/methods/fednova.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client, batch_indices
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declare
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Reply
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.extras import Number
from polyfed.methods.server_optimizers import exchanged_parameters, require_exchange
from polyfed.settings import Settings

STEPS, REFERENCE, SUMS = "fednova_steps", "fednova_reference", "fednova"


def local_steps(client: Client) -> int:
    """Return the number of this client's steps per round."""
    settings = client.bench.settings
    if settings.local_steps is not None:
        return settings.local_steps
    needs_two = any(norm.training for norm in client.bench.batch_norms)
    return sum(1 for _ in batch_indices(len(client.data.train), settings, needs_two, torch.Generator(), client.id))


def effective_steps(steps: int, settings: Settings) -> float:
    """Return the number of steps without momentum that, for a constant gradient, equal these steps with the run's momentum."""
    m = settings.momentum if settings.optimizer == "sgd" else 0.0
    return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


def own_steps(client: Client) -> float:
    return effective_steps(local_steps(client), client.bench.settings)


def reference(server: Server, _: str) -> float:
    settings, samples = server.settings, server.clients[0].samples
    steps = settings.local_steps or settings.local_epochs * math.ceil(samples / settings.batch_size)
    return effective_steps(steps, settings)


def largest_steps(context: RequestContext) -> float:
    """Return the largest possible a_k, plus a margin for rounding."""
    return effective_steps(context.steps, context.server.settings) * (1 + 1e-9)


def smallest_steps(context: RequestContext) -> float:
    return effective_steps(context.fewest_steps, context.server.settings) * (1 - 1e-9)


@declare(reads_data=False)
def report_steps(client: Client) -> dict[str, float]:
    return {STEPS: own_steps(client)}


@dataclass(frozen=True)
class Normalise(Part):
    """Scale the change of exchanged parameters by r / a_k before it is sent."""

    reads_data = False

    def __call__(self, client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scale = client.extras[REFERENCE] / own_steps(client)
        return {**entries, **scaled(client.received, entries, exchanged_parameters(client.bench.plan, client.round), scale)}

    def check(self, bench: Workbench) -> None:
        require_exchange(bench, "fednova")


def scaled(start: Mapping[str, Tensor], end: Mapping[str, Tensor], names: tuple[str, ...], scale: float) -> dict[str, Tensor]:
    """Return start + scale * (end - start); empty for scale 1, to avoid rounding."""
    return {} if scale == 1 else {name: start[name] + scale * (end[name] - start[name]) for name in names if name in end}


@declare(is_capped=True)
def weight_and_count_steps(server: Server, reply: Reply) -> float:
    """Return the run's weight of a client, and add a_k to the weighted sum."""
    weight = server.default_weight(reply.client)
    if STEPS in reply.extras:
        sums: dict[str, float] = server.persistent(SUMS, dict)
        if sums.get("round") != server.round:
            sums = {"round": server.round, "weights": 0.0, "steps": 0.0}
        # Replace the value instead of changing it, because the loop restores the old one if the round is repeated.
        server.memory[SUMS] = {
            "round": server.round,
            "weights": sums["weights"] + weight,
            "steps": sums["steps"] + weight * reply.extras[STEPS],
        }
    return weight


def rescale_change(server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scale the mean change by steps_eff / r."""
    sums: dict[str, float] = server.persistent(SUMS, dict)
    scale = sums["steps"] / sums["weights"] / reference(server, "")
    return {**aggregate, **scaled(server.state, aggregate, exchanged_parameters(server.plan, server.round), scale)}


@register
def fednova() -> Method:
    """Average changes per step, so that clients with many steps do not dominate.

        w <- w + steps_eff * sum_k p_k (w_k - w) / a_k,     steps_eff = sum_k p_k a_k
        a_k = number of local steps;  with momentum m:  a_k = sum over j = 1 ... steps of (1 - m^j) / (1 - m)

    A client uploads w + (w_k - w) * r / a_k with a reference r from the server (the number of steps of the largest client), to
    avoid rounding; the server multiplies by steps_eff / r. If all a_k = r, the result is bit-identical to FedAvg.

    Reference:
        J. Wang et al. Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization. NeurIPS 2020.
    """
    return Method(
        "fednova",
        send_extras={REFERENCE: reference},
        after_training=(report_steps,),
        reply_extras={"train": {STEPS: Number(smallest_steps, largest_steps)}},
        uploads=(Normalise(),),
        weighting=weight_and_count_steps,
        server_step=rescale_change,
        facts=Facts(data_derived_uploads="the number of local steps (one number per round)", granularity="aggregate"),
    )
