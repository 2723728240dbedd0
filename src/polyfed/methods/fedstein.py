"""FedStein: James-Stein estimates of batch-norm statistics. Differences from the paper: docs/methods/fedstein.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from polyfed.core.entries import STATISTIC
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.server import Server
from polyfed.core.sharing import Select, bn_affine, keep_local
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError
from polyfed.methods._shared import require_choice
from polyfed.models.layers.norms import JSBatchNorm, james_stein
from polyfed.models.layers.surgery import plain_batch_norm, replace_batch_norms

VARIANTS = ("jsnorm", "server", "eval_only")
SHRUNK = Select("batch-norm means and variances", kinds=frozenset({STATISTIC}), layers=frozenset({"batch_norm"}))


@dataclass(frozen=True)
class ToJamesStein(Part):
    """Replace every batch norm by one that shrinks its statistics, with the same affine and statistics."""

    shrink_train: bool
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return replace_batch_norms(model, self.layer, "fedstein")

    def layer(self, norm: nn.Module) -> nn.Module:
        return JSBatchNorm.like(plain_batch_norm(norm, "fedstein"), shrink_train=self.shrink_train)


@dataclass(frozen=True)
class ShrinkAverages(Part):
    """Replace averaged statistics by their James-Stein estimates: Algorithm 1, lines 19 to 22."""

    def __call__(self, server: Server, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        entries = server.plan.entries
        return {name: james_stein(value) if SHRUNK.matches(entries[name]) else value for name, value in aggregate.items()}

    def check(self, bench: Workbench) -> None:
        uploaded = {name for phase in bench.plan.phases.values() for name in phase.up}
        if not any(SHRUNK.matches(bench.plan.entries[name]) for name in uploaded):
            raise JoinError(
                f'{bench.method}: no batch-norm statistics are uploaded, so fedstein(variant="server") has no effect. '
                'Use variant="jsnorm", or remove the part that keeps statistics local.'
            )


@register
def fedstein(variant: str = "jsnorm", shrink: bool = True) -> Method:
    """Share James-Stein estimates of batch-norm statistics, keep the affine local.

        JS(v) = (1 - (c - 2) * s2(v) / ||v||^2) * v        s2(v): variance of the entries of v across channels (divided by c)
        y = gamma_k * (x - JS(mu)) / sqrt(JS(sigma2) + eps) + beta_k

        w, mu, sigma2 <- sum_k p_k (w, mu, sigma2)_k;   gamma_k, beta_k stay at client k

    v is the vector of the c channel means (or variances) of a layer; the factor is in [2/c, 1].

    Args:
        variant: jsnorm (shrink in the layers), server (Algorithm 1, literally) or eval_only.
        shrink: False disables the shrinkage, which gives FedAvg with a local batch-norm affine.

    Reference:
        S. Gupta, N. Jangid and A. Sethi. FedStein: Enhancing Multi-Domain Federated Learning Through James-Stein Estimator.
        2024.
        S. Khoshsirat and C. Kambhamettu. Improving Normalization with the James-Stein Estimator. WACV 2024 (the layer, JSNorm).
    """
    require_choice("fedstein", "variant", variant, VARIANTS)
    at_server = shrink and variant == "server"
    in_layers = shrink and variant != "server"
    return Method(
        "fedstein",
        surgery=(ToJamesStein(shrink_train=variant == "jsnorm"),) if in_layers else (),
        server_step=ShrinkAverages() if at_server else None,
        sharing=(keep_local(bn_affine),),
        facts=Facts(batch_norm=True, client_state=True, extra_work="one factor per layer and step" if shrink else ""),
    )
