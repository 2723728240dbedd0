"""FedBN: batch-norm layers never leave the client; everything else is averaged.

    theta = (w, gamma, beta, mu, sigma2):   w <- sum_k p_k w_k;   gamma_k, beta_k, mu_k, sigma2_k stay at client k

Reference: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Differences from the paper: layers are chosen by module type, not by the letters "bn" in a name, which would miss the shortcut norms of a
torchvision ResNet. The authors' program weighs clients equally; here weights are a setting of the run (``--weights uniform``).
A newcomer gets the average of the clients' batch-norm affine and statistics (FedWon B.2), or one of the other choices of ``polyfed evaluate``.
"""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import batch_norm, keep_local


@register
def fedbn() -> Method:
    """Keep batch norm local, affine and statistics."""
    return Method("fedbn", sharing=(keep_local(batch_norm),), facts=Facts(batch_norm=True, client_state=True))
