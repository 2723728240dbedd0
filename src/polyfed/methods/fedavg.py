"""FedAvg: the weighted mean of all entries. Differences from the paper: docs/methods/fedavg.md."""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import First
from polyfed.core.sharing import Rule, bn_statistics, keep_local, reduce_with
from polyfed.methods._shared import require_choice

STATISTICS: dict[str, tuple[Rule, ...]] = {
    "average": (),
    "local": (keep_local(bn_statistics),),
    "first": (reduce_with(bn_statistics, First()),),
    "drop": (Rule(bn_statistics, up=False, down=True),),
}


@register(base=True)
def fedavg(statistics: str = "average") -> Method:
    """Average everything, weighted by samples.

        theta <- sum_k p_k theta_k      p_k = n_k / sum_j n_j      (--weights uniform: p_k = 1 / K)

    Args:
        statistics: how to share batch-norm statistics: average, local, first or drop.

    Reference:
        B. McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.
    """
    require_choice("fedavg", "statistics", statistics, STATISTICS)
    return Method("fedavg", sharing=STATISTICS[statistics], facts=Facts(client_state=statistics == "local"))
