"""PartialFed-Fix: everything is uploaded and averaged, but clients load only some layers; the others go on from their own last model.

    theta_k^{start, l} = theta_glob^l where layer l is loaded, else theta_k^{previous round, l};   theta_glob <- sum_k p_k theta_k, all layers

Reference: Sun et al., PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization, NeurIPS 2021.

Differences from the paper: no code of the authors was available to check against. The paper tries several fixed choices by hand (bottom layers,
top layers, without batch norm, without classifier); FedWon Table 17 does not say which it ran. The default here loads everything but batch norm (affine
and statistics) and the classifier. The paper broadcasts the whole model; layers that nobody would load are not sent here. A newcomer gets the average.
"""

from __future__ import annotations

from polyfed.core.method import Facts, Method, register
from polyfed.core.sharing import Select, batch_norm, bn_affine, bn_statistics, head, upload_only
from polyfed.errors import OptionError

PARTS: dict[str, Select] = {"batch_norm": batch_norm, "head": head, "bn_affine": bn_affine, "bn_statistics": bn_statistics}


def selection(text: str) -> Select:
    """A part of the model by its kind, or by a pattern of names such as ``layer4.*``."""
    if text in PARTS:
        return PARTS[text]
    if isinstance(text, str) and any(sign in text for sign in "*?["):
        return Select(f"entry named {text}", names=(text,))
    raise OptionError(
        f"partialfed_fix: skip cannot name {text!r}. It takes {', '.join(PARTS)}, and patterns of names with * such as 'layer4.*'."
    )


@register(shows=("skip",))
def partialfed_fix(skip: tuple[str, ...] = ("batch_norm", "head")) -> Method:
    """Upload everything, load everything but some layers.

    Args:
        skip: what clients do not load: batch_norm, head, bn_affine, bn_statistics, and patterns of names such as layer4.*; () is FedAvg.
    """
    if not isinstance(skip, tuple):
        raise OptionError(f'partialfed_fix: skip takes a list of parts such as ("batch_norm", "head"), found {skip!r}.')
    chosen = [selection(text) for text in dict.fromkeys(skip)]
    needs_batch_norm = any(select.layers == batch_norm.layers for select in chosen)
    return Method(
        "partialfed_fix",
        sharing=tuple(map(upload_only, chosen)),
        facts=Facts(batch_norm=needs_batch_norm, client_state=bool(chosen)),
    )
