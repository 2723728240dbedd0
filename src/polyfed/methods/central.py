"""Central: one model on the union of all clients' training data. Upper reference; nothing about it is federated.

Reference: Central in hFedF, Centralised in FixBN.

Differences: the same number of epochs (T * E) and the same settings as FedAvg; optimizer state is kept, as in one uninterrupted training.
"""

from __future__ import annotations

from polyfed.core.data_types import Federation
from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import Rule, momentum_buffers


def pool(federation: Federation) -> Federation:
    """Put all training data at one client."""
    return federation.pooled()


@register
def central() -> Method:
    """Train one model on everybody's data."""
    return Method(
        "central",
        population=pool,
        sharing=(Rule(momentum_buffers, keep=True, optional=True),),
        facts=Facts(data_derived_uploads="all training data, pooled in one place", granularity="per sample"),
    )
