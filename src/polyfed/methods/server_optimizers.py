"""Server optimizers: FedAvgM, FedAdam, FedAdagrad and FedYogi. Differences from the paper: docs/methods, one page per method."""

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
    """Return the trainable parameters that are sent and uploaded in a round, whose change the server can compute."""
    travels = plan.at(round_number).travels
    return tuple(n for n, entry in plan.entries.items() if entry.trainable and travels[n].up and travels[n].down)


def require_exchange(bench: Workbench, part: str) -> None:
    if not any(exchanged_parameters(bench.plan, start + 1) for start in bench.plan.phases):
        raise JoinError(f"{bench.method}: no parameter is both sent and uploaded, so {part} would be ignored. Remove it.")


def _pseudo_gradient(server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = exchanged_parameters(server.plan, server.round)
    return {name: server.state[name] - aggregate[name] for name in names if name in aggregate}


@dataclass(frozen=True)
class ServerMomentum(Part):
    """Set v <- momentum * v + g, w <- w - lr * v."""

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
    """Set w <- w - lr * m / (sqrt(v) + tau); ``second`` computes the next v from v, the squared pseudo-gradient and beta2."""

    part: str
    second: Callable[[Tensor, Tensor, float], Tensor]
    lr: float
    beta1: float
    beta2: float
    tau: float

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.tau <= 0:
            raise OptionError(f"{self.part}: lr and tau must be positive, got lr={self.lr}, tau={self.tau}.")
        if not 0 <= self.beta1 < 1 or not 0 <= self.beta2 <= 1:
            raise OptionError(
                f"{self.part}: beta1 must be in [0, 1) and beta2 in [0, 1], got beta1={self.beta1}, beta2={self.beta2}."
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
    """Update the server's model with momentum.

        g = w - sum_k p_k w_k
        v <- momentum * v + g
        w <- w - lr * v

    Args:
        momentum: fraction of the last step that is kept, in [0, 1); 0 with lr = 1 is FedAvg.
        lr: learning rate of the server.

    Reference:
        T.-M. H. Hsu, H. Qi and M. Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification. 2019.
        S. J. Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    """
    if not 0 <= momentum < 1 or lr <= 0:
        raise OptionError(f"fedavgm: momentum must be in [0, 1) and lr must be positive, got momentum={momentum}, lr={lr}.")
    neutral = momentum == 0 and lr == 1
    return Method("fedavgm", server_step=None if neutral else ServerMomentum(momentum, lr))


@register(shows=("lr",))
def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Update the server's model with Adam.

        g = w - sum_k p_k w_k
        m <- beta1 * m + (1 - beta1) * g          m starts at 0
        v <- beta2 * v + (1 - beta2) * g^2        v starts at tau^2
        w <- w - lr * m / (sqrt(v) + tau)

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: decay of the mean of their squares; 1 keeps the initial value.
        tau: added to the root; larger is less adaptive.

    Reference:
        S. J. Reddi et al. Adaptive Federated Optimization. ICLR 2021. Algorithm 2.
    """
    return Method("fedadam", server_step=AdaptiveStep("fedadam", _adam, lr, beta1, beta2, tau))


@register(shows=("lr",))
def fedadagrad(lr: float = 0.1, beta1: float = 0.0, tau: float = 0.001) -> Method:
    """Update the server's model with Adagrad.

        g = w - sum_k p_k w_k
        m <- beta1 * m + (1 - beta1) * g          m starts at 0
        v <- v + g^2                              v starts at tau^2
        w <- w - lr * m / (sqrt(v) + tau)

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients; 0 uses only the last one.
        tau: added to the root; larger is less adaptive.

    Reference:
        S. J. Reddi et al. Adaptive Federated Optimization. ICLR 2021. Algorithm 2.
    """
    return Method("fedadagrad", server_step=AdaptiveStep("fedadagrad", _adagrad, lr, beta1, 0.0, tau))


@register(shows=("lr",))
def fedyogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Update the server's model with Yogi.

        g = w - sum_k p_k w_k
        m <- beta1 * m + (1 - beta1) * g                    m starts at 0
        v <- v - (1 - beta2) * g^2 * sign(v - g^2)          v starts at tau^2
        w <- w - lr * m / (sqrt(v) + tau)

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: 1 minus the rate of change of the second moment; 1 keeps the initial value.
        tau: added to the root; larger is less adaptive.

    Reference:
        S. J. Reddi et al. Adaptive Federated Optimization. ICLR 2021. Algorithm 2.
    """
    return Method("fedyogi", server_step=AdaptiveStep("fedyogi", _yogi, lr, beta1, beta2, tau))
