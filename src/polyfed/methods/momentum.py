"""Maintained momentum: what happens to the clients' momentum buffers between rounds.

    v <- m v + grad;   w <- w - lr v

``none``: buffers start at zero each round, as everywhere else (neutral). ``local``: each client keeps its own.
``global``: buffers are uploaded, averaged with the clients' weights, and sent with the model: twice the traffic, no state at clients.
A buffer follows its parameter: where the parameter stays local, so does its buffer.

Reference: FixBN (Zhong et al.), appendix C.4. The buffer holds no learning rate, so a later decay needs no rescaling.

Differences from the paper: works with any optimizer of the run; Adam's buffers are kept or averaged alike.
"""

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

    Args:
        keep: none, local or global.
    """
    require_choice("momentum", "keep", keep, RULES)
    return Method("momentum", sharing=RULES[keep], standalone=False, facts=Facts(client_state=keep == "local"))
