"""FedYogi: Yogi at the server: Adam whose second moment moves by a bounded amount.

    g = w - sum_k p_k w_k   (the pseudo-gradient)
    m <- beta1 * m + (1 - beta1) * g;   v <- v - (1 - beta2) * g^2 * sign(v - g^2);   w <- w - lr * m / (sqrt(v) + tau)
    m starts at 0, v at tau^2; no correction of the start

Only trainable parameters that are both sent and uploaded are stepped; statistics, counters and everything else are FedAvg's.

Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2. Defaults: beta1 = 0.9, beta2 = 0.99, tau = 0.001 are its experiments';
lr is tuned for each task there, 0.01 is our choice.

Differences from the paper: those of ``fedadam``. No code of the authors was checked.
"""

from __future__ import annotations

from torch import Tensor

from polyfed.core.method import Method, register
from polyfed.methods.fedadam import AdaptiveStep, refuse_options


def towards(v: Tensor, squared: Tensor, beta2: float) -> Tensor:
    """Yogi's second moment: a step towards the square, as large as a share of the square."""
    return v - (1 - beta2) * squared * (v - squared).sign()


@register(shows=("lr",))
def fedyogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Move the server's model with Yogi.

    Args:
        lr: learning rate of the server.
        beta1: decay of the mean of pseudo-gradients.
        beta2: 1 minus the speed of the second moment; 1 leaves it at its start.
        tau: added to the root; larger is less adaptive.
    """
    refuse_options("fedyogi", lr, beta1, beta2, tau)
    return Method("fedyogi", server_step=AdaptiveStep("fedyogi", towards, lr, beta1, beta2, tau))
