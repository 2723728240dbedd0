"""gPerXAN: PerXAN (instance norm next to personal batch norm) with the guiding regulariser.

    XAN(x) = w_in * IN(x) + w_bn * BN(x);   loss_i = l(h_i(g_i(x)), y) + guide * l(h_received(g_i(x)), y)

It is ``perxan + guiding`` under the name of the paper; the formulas and the choices are explained there.

Reference: Le et al., Efficiently Assemble Normalization Layers and Regularization for Federated Domain Generalization, CVPR 2024, Algorithm 1.

Differences from the paper: those of perxan and guiding. Its program also keeps the clients' momentum between rounds
(``gperxan + momentum(keep="local")``), with SGD lr 0.002, momentum 0.9, weight decay 5e-4, batches of 32 and a cosine schedule over 100 rounds of one
epoch: settings of the run. guide = 0.5 is the program's value; the paper searches 0 to 1 in steps of 0.25.
"""

from __future__ import annotations

from dataclasses import replace

from polyfed.core.method import Method, register
from polyfed.errors import OptionError
from polyfed.methods.guiding import Guide
from polyfed.methods.perxan import XAN_OPTIONS, assembled


@register(shared_options=XAN_OPTIONS)
def gperxan(  # noqa: D417 (the other options: XAN_OPTIONS)
    guide: float = 0.5,
    where: str | tuple[str, ...] = "all",
    rest: str = "local",
    mix_local: str = "bn_only",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
) -> Method:
    """PerXAN with features guided by the classifier the server sent.

    Args:
        guide: weight of the guiding loss; 0 is perxan.
    """
    if guide < 0:
        raise OptionError(f"gperxan: guide must not be negative, found {guide}.")
    base = assembled("gperxan", where, rest, mix_local, in_init, instance_score, tiny_maps)
    work = f"{base.facts.extra_work}; one more head pass per step"
    return (
        replace(base, objective=(Guide(guide),), facts=replace(base.facts, class_labels=True, extra_work=work)) if guide else base
    )
