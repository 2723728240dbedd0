"""FedBN and SiloBN: batch-norm layers, or their statistics only, never leave the client; everything else is averaged.

    fedbn:    w <- sum_k p_k w_k;   gamma_k, beta_k, mu_k, sigma2_k stay at client k
    silobn:   w, gamma, beta <- sum_k p_k (w, gamma, beta)_k;   mu_k, sigma2_k stay at client k

Reference: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021; Andreux et al., Siloed Federated Learning
for Multi-centric Histopathology Datasets (SiloBN), DCL 2020.

Differences from the papers: layers are chosen by module type, not by the letters "bn" in a name, which would miss the shortcut norms of a
torchvision ResNet. The program of FedBN's authors weighs clients equally; here weights are a setting of the run (``--weights uniform``).
A newcomer gets the average of what clients keep (FedWon B.2), or one of the other choices of ``polyfed evaluate``; SiloBN's paper recomputes statistics
on the new domain's images (``--newcomer re-estimated``). No code of SiloBN's authors was available to check against.
"""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import batch_norm, bn_statistics, keep_local


@register
def fedbn() -> Method:
    """Keep batch norm local, affine and statistics."""
    return Method("fedbn", sharing=(keep_local(batch_norm),), facts=Facts(batch_norm=True, client_state=True))


@register
def silobn() -> Method:
    """Keep batch-norm statistics local, share the affine."""
    return Method("silobn", sharing=(keep_local(bn_statistics),), facts=Facts(batch_norm=True, client_state=True))
