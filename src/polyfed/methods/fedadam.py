"""FedAdam: Adam at the server.

    g = w - sum_k p_k w_k   (the pseudo-gradient)
    m <- beta1 * m + (1 - beta1) * g;   v <- beta2 * v + (1 - beta2) * g^2;   w <- w - lr * m / (sqrt(v) + tau)
    m starts at 0, v at tau^2; no correction of the start

Only trainable parameters that are both sent and uploaded are stepped; statistics, counters and everything else are FedAvg's.

Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Defaults: beta1 = 0.9, beta2 = 0.99, tau = 0.001 are its experiments';
lr is tuned for each task there, 0.01 is our choice.

Differences from the paper: it asks for a start of v of at least tau^2; here it is tau^2. It weighs clients by samples or alike; here that is a
setting of the run. Batch-norm statistics are averaged, not stepped. No code of the authors was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.method import Method, register
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.methods.fedavgm import pseudo_gradient, require_exchange


def decaying_mean(v: Tensor, squared: Tensor, beta2: float) -> Tensor:
    """Adam's second moment."""
    return beta2 * v + (1 - beta2) * squared


@dataclass(frozen=True)
class AdaptiveStep:
    """w <- w - lr * m / (sqrt(v) + tau); ``second`` says how v follows the squared pseudo-gradient."""

    part: str
    second: Callable[[Tensor, Tensor, float], Tensor]
    lr: float
    beta1: float
    beta2: float
    tau: float

    def __call__(self, server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moments: dict[str, dict[str, Tensor]] = server.remember(self.part, lambda: {"m": {}, "v": {}})
        first, second = moments["m"], moments["v"]
        moved = {}
        for name, gradient in pseudo_gradient(server, aggregate).items():
            m = first.get(name, torch.zeros_like(gradient))
            v = second.get(name, torch.full_like(gradient, self.tau**2))
            first[name] = self.beta1 * m + (1 - self.beta1) * gradient
            second[name] = self.second(v, gradient.square(), self.beta2)
            moved[name] = server.state[name] - self.lr * first[name] / (second[name].sqrt() + self.tau)
        return {**aggregate, **moved}

    def check(self, bench: Workbench) -> None:
        """There must be something to step."""
        require_exchange(bench, self.part)


def refuse_options(part: str, lr: float, beta1: float, beta2: float, tau: float) -> None:
    """Options outside their ranges."""
    if lr <= 0 or tau <= 0:
        raise OptionError(f"{part}: lr and tau must be positive, found lr={lr}, tau={tau}.")
    if not 0 <= beta1 < 1 or not 0 <= beta2 <= 1:
        raise OptionError(f"{part}: beta1 lies in [0, 1) and beta2 in [0, 1], found beta1={beta1}, beta2={beta2}.")


@register(shows=("lr",))
def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Move the server's model with Adam.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: decay of the mean of their squares; 1 leaves it at its start.
        tau: added to the root; larger is less adaptive.
    """
    refuse_options("fedadam", lr, beta1, beta2, tau)
    return Method("fedadam", server_step=AdaptiveStep("fedadam", decaying_mean, lr, beta1, beta2, tau))
