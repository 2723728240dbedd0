"""SCAFFOLD: control variates against client drift. Differences from the paper: docs/methods/scaffold.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client, Step
from polyfed.core.entries import MOMENTUM
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declare
from polyfed.core.replies import RequestContext
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError, SettingError
from polyfed.extras import LikeEntries
from polyfed.methods.fednova import own_steps
from polyfed.methods.server_optimizers import ServerMomentum, exchanged_parameters, require_exchange

CONTROL, CHANGE, MEMORY = "scaffold_control", "scaffold_change", "scaffold"


def send_control(server: Server, _: str) -> dict[str, Tensor]:
    """Return the server's control variate; empty while it is zero."""
    return dict(server.persistent(MEMORY, dict))


def controls(client: Client) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the control variates of the server and of this client."""
    return client.extras[CONTROL], client.memory.get(MEMORY, {})


@dataclass(frozen=True)
class CorrectDrift(Part):
    """Set gradient <- gradient - c_k + c."""

    stage = "correct"
    reads_data = False

    @torch.no_grad()
    def __call__(self, step: Step) -> None:
        shared, own = controls(step.client)
        for name, parameter in step.client.bench.parameters.items():
            if parameter.grad is not None and name in shared:
                parameter.grad.add_(shared[name])
            if parameter.grad is not None and name in own:
                parameter.grad.sub_(own[name])

    def check(self, bench: Workbench) -> None:
        """Require SGD without carried-over momentum; otherwise the change of a model does not reveal its mean gradient."""
        require_exchange(bench, "scaffold")
        if bench.settings.optimizer != "sgd":
            raise SettingError(
                f"scaffold derives gradients from the steps of SGD, but the optimizer is {bench.settings.optimizer}. Use --optimizer sgd."
            )
        entries = bench.plan.entries
        for phase in bench.plan.phases.values():
            if any(entries[name].kind == MOMENTUM and (travel.up or travel.keep) for name, travel in phase.travels.items()):
                raise JoinError(
                    f'{bench.method}: scaffold derives gradients from the steps of a round, which carried-over momentum would distort. Use momentum(keep="none").'
                )


@declare(reads_data=False)
def renew_control(client: Client) -> dict[str, Any]:
    """Compute c_k+ by option II, store it here, and return its change."""
    shared, own = controls(client)
    far = own_steps(client) * client.lr
    if far == 0:
        return {CHANGE: {}}
    new, change = dict(own), {}
    for name in exchanged_parameters(client.bench.plan, client.round):
        gradient = (client.received[name] - client.bench.live[name].detach()) / far
        new[name] = gradient + own[name] if name in own else gradient
        new[name] = new[name] - shared[name] if name in shared else new[name]
        change[name] = new[name] - own[name] if name in own else new[name]
    client.memory[MEMORY] = new
    return {CHANGE: change}


def exchanged(context: RequestContext) -> tuple[str, ...]:
    return exchanged_parameters(context.plan, context.request.round)


def update_control(server: Server, extras: Mapping[str, Mapping[str, Any]]) -> None:
    """Add P_k times the clients' changes to c; absent clients contribute zero."""
    weights = server.default_weights([info.id for info in server.clients])
    total = sum(weights.values())
    control: dict[str, Tensor] = server.persistent(MEMORY, dict)
    for client, sent in extras.items():
        for name, change in sent[CHANGE].items():
            step = weights[client] / total * change
            control[name] = control[name] + step if name in control else step


@register
def scaffold(server_lr: float = 1.0) -> Method:
    """Correct each client's gradients by their difference from the mean of all clients.

        client:  gradient <- gradient - c_k + c
                 after K steps:  c_k+ = c_k - c + (w - w_k) / (K * lr)
        server:  w <- w + server_lr * sum_k p_k (w_k - w)
                 c <- c + sum over the round's clients of P_k (c_k+ - c_k),   P_k = weight among all clients

    Args:
        server_lr: step of the server towards the mean; 1 sets the mean.

    Reference:
        S. P. Karimireddy et al. SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML 2020. Algorithm 1,
        option II.
    """
    if server_lr <= 0:
        raise OptionError(f"scaffold: server_lr must be positive, got {server_lr}.")
    return Method(
        "scaffold",
        send_extras={CONTROL: send_control},
        gradients=(CorrectDrift(),),
        after_training=(renew_control,),
        reply_extras={"train": {CHANGE: LikeEntries(exchanged, or_none=True)}},
        after_round=(update_control,),
        server_step=None if server_lr == 1 else ServerMomentum(0.0, server_lr, "scaffold"),
        facts=Facts(
            client_state=True,
            data_derived_uploads="changes of control variates (model-shaped mean gradients, each round)",
            granularity="aggregate",
            extra_work="one addition to each gradient per step",
        ),
    )
