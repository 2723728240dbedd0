"""FedBN and SiloBN: local batch-norm layers, or only their statistics. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import batch_norm, bn_statistics, keep_local


@register
def fedbn() -> Method:
    """Keep batch norm local, affine and statistics.

        theta = (w, gamma, beta, mu, sigma2)
        w <- sum_k p_k w_k           gamma_k, beta_k, mu_k, sigma2_k stay at client k

    Reference:
        X. Li et al. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021.
    """
    return Method("fedbn", sharing=(keep_local(batch_norm),), facts=Facts(batch_norm=True, client_state=True))


@register
def silobn() -> Method:
    """Keep batch-norm statistics local, share the affine.

        w, gamma, beta <- sum_k p_k (w, gamma, beta)_k           mu_k, sigma2_k stay at client k

    Reference:
        M. Andreux et al. Siloed Federated Learning for Multi-Centric Histopathology Datasets. DCL 2020.
    """
    return Method("silobn", sharing=(keep_local(bn_statistics),), facts=Facts(batch_norm=True, client_state=True))
