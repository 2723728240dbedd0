"""FedAdagrad: Adagrad at the server.

    g = w - sum_k p_k w_k   (the pseudo-gradient)
    m <- beta1 * m + (1 - beta1) * g;   v <- v + g^2;   w <- w - lr * m / (sqrt(v) + tau)
    m starts at 0, v at tau^2

Only trainable parameters that are both sent and uploaded are stepped; statistics, counters and everything else are FedAvg's.

Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Defaults: beta1 = 0 (plain Adagrad), tau = 0.001; lr is tuned for
each task there, 0.1 is our choice.

Differences from the paper: those of ``fedadam``. No code of the authors was checked.
"""

from __future__ import annotations

from torch import Tensor

from polyfed.core.method import Method, register
from polyfed.methods.fedadam import AdaptiveStep, refuse_options


def running_sum(v: Tensor, squared: Tensor, _: float) -> Tensor:
    """Adagrad's second moment: the sum of all squares."""
    return v + squared


@register(shows=("lr",))
def fedadagrad(lr: float = 0.1, beta1: float = 0.0, tau: float = 0.001) -> Method:
    """Move the server's model with Adagrad.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients; 0 takes the last one.
        tau: added to the root; larger is less adaptive.
    """
    refuse_options("fedadagrad", lr, beta1, 0.0, tau)
    return Method("fedadagrad", server_step=AdaptiveStep("fedadagrad", running_sum, lr, beta1, 0.0, tau))
