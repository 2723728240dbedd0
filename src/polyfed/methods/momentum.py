"""Maintained momentum: client momentum buffers between rounds. Differences from the paper: docs/methods/momentum.md."""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import Rule, momentum_buffers
from polyfed.methods._shared import require_choice

RULES: dict[str, tuple[Rule, ...]] = {
    "none": (),
    "local": (Rule(momentum_buffers, up=False, down=False, keep=True),),
    "global": (Rule(momentum_buffers, up=True, down=True),),
}


@register(shows=("keep",))
def momentum(keep: str = "none") -> Method:
    """Keep or average the clients' momentum between rounds.

        v <- m * v + gradient      w <- w - lr * v
        none:    v = 0 at the start of each round
        local:   v_k is the value of client k at the end of its last round
        global:  v <- sum_k p_k v_k, sent with the model

    Args:
        keep: none, local (at the client) or global (averaged).

    Reference:
        J. Zhong, H.-Y. Chen and W.-L. Chao. Making Batch Normalization Great in Federated Deep Learning. 2023. Appendix C.4.
    """
    require_choice("momentum", "keep", keep, RULES)
    return Method("momentum", sharing=RULES[keep], standalone=False, facts=Facts(client_state=keep == "local"))
