"""SiloBN: share the learnt affine of batch norm, keep the activation statistics private.

    w, gamma, beta <- sum_k p_k (w, gamma, beta)_k;   mu_k, sigma2_k stay at client k

Reference: Andreux et al., Siloed Federated Learning for Multi-centric Histopathology Datasets, DCL 2020.

Differences from the paper: on a new domain the paper recomputes statistics on its images; that is ``polyfed evaluate --newcomer re-estimated``.
The default newcomer gets averaged statistics. No code of the authors was available to check against.
"""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import bn_statistics, keep_local


@register
def silobn() -> Method:
    """Keep batch-norm statistics local, share the affine."""
    return Method("silobn", sharing=(keep_local(bn_statistics),), facts=Facts(batch_norm=True, client_state=True))
