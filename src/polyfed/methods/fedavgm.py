"""FedAvgM: momentum at the server.

    g = w - sum_k p_k w_k   (received minus averaged: the pseudo-gradient)
    v <- momentum * v + g;   w <- w - lr * v

Only trainable parameters that are both sent and uploaded have a pseudo-gradient; statistics, counters and everything else are FedAvg's.

Reference: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019; Reddi et al.,
Adaptive Federated Optimization, ICLR 2021, whose experiments take momentum 0.9.

Differences from the papers: statistics of batch norm are averaged, not stepped (the papers do not treat them); weights of clients are those of the
run. No code of the authors was checked. ``momentum=0.0, lr=1.0`` is FedAvg and fills no slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyfed.core.method import Method, register
from polyfed.core.server import Server
from polyfed.core.sharing import Plan
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError


def exchanged_parameters(plan: Plan, round_number: int) -> tuple[str, ...]:
    """Trainable parameters that are sent and uploaded in a round: those whose change the server can see."""
    travels = plan.at(round_number).travels
    return tuple(n for n, entry in plan.entries.items() if entry.trainable and travels[n].up and travels[n].down)


def require_exchange(bench: Workbench, part: str) -> None:
    """Refuse a part that works on exchanged parameters where there are none."""
    if not any(exchanged_parameters(bench.plan, start + 1) for start in bench.plan.phases):
        raise JoinError(f"{bench.method}: no parameter is both sent and uploaded, so {part} would be ignored. Leave it out.")


def pseudo_gradient(server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was sent minus what came back, for each exchanged parameter."""
    names = exchanged_parameters(server.plan, server.round)
    return {name: server.state[name] - aggregate[name] for name in names if name in aggregate}


@dataclass(frozen=True)
class ServerMomentum:
    """v <- momentum * v + g, w <- w - lr * v."""

    momentum: float
    lr: float
    part: str = "fedavgm"

    def __call__(self, server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = pseudo_gradient(server, aggregate)
        if self.momentum:
            velocity: dict[str, Tensor] = server.remember(self.part, dict)
            for name, gradient in step.items():
                velocity[name] = self.momentum * velocity[name] + gradient if name in velocity else gradient
            step = {name: velocity[name] for name in step}
        return {**aggregate, **{name: server.state[name] - self.lr * change for name, change in step.items()}}

    def check(self, bench: Workbench) -> None:
        """There must be something to step."""
        require_exchange(bench, self.part)


@register(shows=("momentum",))
def fedavgm(momentum: float = 0.9, lr: float = 1.0) -> Method:
    """Move the server's model with momentum.

    Args:
        momentum: share of the last step that is kept, in [0, 1); 0 with lr = 1 is FedAvg.
        lr: learning rate of the server.
    """
    if not 0 <= momentum < 1 or lr <= 0:
        raise OptionError(f"fedavgm: momentum lies in [0, 1) and lr is positive, found momentum={momentum}, lr={lr}.")
    neutral = momentum == 0 and lr == 1
    return Method("fedavgm", server_step=None if neutral else ServerMomentum(momentum, lr))
