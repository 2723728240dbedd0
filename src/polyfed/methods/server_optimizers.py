"""Server optimizers (FedAvgM, FedAdam, FedAdagrad, FedYogi): the server steps along the pseudo-gradient instead of taking the average.

    g = w - sum_k p_k w_k   (sent minus averaged: the pseudo-gradient)
    fedavgm:   v <- momentum * v + g;   w <- w - lr * v
    others:    m <- beta1 * m + (1 - beta1) * g;   w <- w - lr * m / (sqrt(v) + tau);   m starts at 0, v at tau^2, no correction of the start
      fedadam:      v <- beta2 * v + (1 - beta2) * g^2
      fedadagrad:   v <- v + g^2
      fedyogi:      v <- v - (1 - beta2) * g^2 * sign(v - g^2), which moves by a bounded amount

Only trainable parameters that are both sent and uploaded are stepped; statistics, counters and everything else are FedAvg's.

Reference: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019 (FedAvgM); Reddi et al.,
Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Defaults: momentum = 0.9, beta1 = 0.9 (FedAdagrad: 0, plain Adagrad), beta2 = 0.99 and
tau = 0.001 are the experiments of Reddi et al., which tune lr for each task; 0.01 (FedAdagrad: 0.1) is our choice.

Differences from the papers: Reddi et al. ask for a start of v of at least tau^2; here it is tau^2. They weigh clients by samples or alike; here that is
a setting of the run. Batch-norm statistics are averaged, not stepped (the papers do not treat them). No code of the authors was checked.
``fedavgm(momentum=0.0, lr=1.0)`` is FedAvg and fills no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.method import Method, register
from polyfed.core.part import Part
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


def _pseudo_gradient(server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = exchanged_parameters(server.plan, server.round)
    return {name: server.state[name] - aggregate[name] for name in names if name in aggregate}


@dataclass(frozen=True)
class ServerMomentum(Part):
    """v <- momentum * v + g, w <- w - lr * v."""

    momentum: float
    lr: float
    part: str = "fedavgm"

    def __call__(self, server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = _pseudo_gradient(server, aggregate)
        if self.momentum:
            velocity: dict[str, Tensor] = server.persistent(self.part, dict)
            for name, gradient in step.items():
                velocity[name] = self.momentum * velocity[name] + gradient if name in velocity else gradient
            step = {name: velocity[name] for name in step}
        return {**aggregate, **{name: server.state[name] - self.lr * change for name, change in step.items()}}

    def check(self, bench: Workbench) -> None:
        require_exchange(bench, self.part)


@dataclass(frozen=True)
class AdaptiveStep(Part):
    """w <- w - lr * m / (sqrt(v) + tau); ``second`` makes the next v from v, the squared pseudo-gradient and beta2."""

    part: str
    second: Callable[[Tensor, Tensor, float], Tensor]
    lr: float
    beta1: float
    beta2: float
    tau: float

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.tau <= 0:
            raise OptionError(f"{self.part}: lr and tau must be positive, found lr={self.lr}, tau={self.tau}.")
        if not 0 <= self.beta1 < 1 or not 0 <= self.beta2 <= 1:
            raise OptionError(
                f"{self.part}: beta1 lies in [0, 1) and beta2 in [0, 1], found beta1={self.beta1}, beta2={self.beta2}."
            )

    def __call__(self, server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moments: dict[str, dict[str, Tensor]] = server.persistent(self.part, lambda: {"m": {}, "v": {}})
        first, second = moments["m"], moments["v"]
        moved = {}
        for name, gradient in _pseudo_gradient(server, aggregate).items():
            m = first.get(name, torch.zeros_like(gradient))
            v = second.get(name, torch.full_like(gradient, self.tau**2))
            first[name] = self.beta1 * m + (1 - self.beta1) * gradient
            second[name] = self.second(v, gradient.square(), self.beta2)
            moved[name] = server.state[name] - self.lr * first[name] / (second[name].sqrt() + self.tau)
        return {**aggregate, **moved}

    def check(self, bench: Workbench) -> None:
        require_exchange(bench, self.part)


def _adam(v: Tensor, squared: Tensor, beta2: float) -> Tensor:
    return beta2 * v + (1 - beta2) * squared


def _adagrad(v: Tensor, squared: Tensor, _: float) -> Tensor:
    return v + squared


def _yogi(v: Tensor, squared: Tensor, beta2: float) -> Tensor:
    return v - (1 - beta2) * squared * (v - squared).sign()


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


@register(shows=("lr",))
def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Move the server's model with Adam.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: decay of the mean of their squares; 1 leaves it at its start.
        tau: added to the root; larger is less adaptive.
    """
    return Method("fedadam", server_step=AdaptiveStep("fedadam", _adam, lr, beta1, beta2, tau))


@register(shows=("lr",))
def fedadagrad(lr: float = 0.1, beta1: float = 0.0, tau: float = 0.001) -> Method:
    """Move the server's model with Adagrad.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients; 0 takes the last one.
        tau: added to the root; larger is less adaptive.
    """
    return Method("fedadagrad", server_step=AdaptiveStep("fedadagrad", _adagrad, lr, beta1, 0.0, tau))


@register(shows=("lr",))
def fedyogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Move the server's model with Yogi.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: 1 minus the speed of the second moment; 1 leaves it at its start.
        tau: added to the root; larger is less adaptive.
    """
    return Method("fedyogi", server_step=AdaptiveStep("fedyogi", _yogi, lr, beta1, beta2, tau))
