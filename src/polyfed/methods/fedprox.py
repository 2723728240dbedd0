"""FedProx: a proximal term. Differences from the paper: docs/methods/fedprox.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Step
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError


@dataclass(frozen=True)
class Proximal(Part):
    """Add mu/2 * ||w - w_received||^2."""

    mu: float
    reads_data = False

    def __call__(self, step: Step) -> Tensor:
        pairs = ((p, step.client.received[name]) for name, p in step.client.shared_parameters())
        return self.mu / 2 * torch.stack([(p - w).square().sum() for p, w in pairs]).sum()

    def check(self, bench: Workbench) -> None:
        sent = {name for phase in bench.plan.phases.values() for name in phase.down}
        if not sent & set(bench.parameters):
            raise JoinError(f"{bench.method}: no parameter is sent to clients, so fedprox would be ignored. Remove it.")


@register(shows=("mu",))
def fedprox(mu: float = 0.01) -> Method:
    """Keep each client close to the model that it received.

        loss_k(w) = task loss + mu / 2 * ||w - w_received||^2      over the trainable parameters that the server sent

    Args:
        mu: weight of the proximal term; 0 is FedAvg.

    Reference:
        T. Li et al. Federated Optimization in Heterogeneous Networks. MLSys 2020.
    """
    if mu < 0:
        raise OptionError(f"fedprox: mu must not be negative, got {mu}.")
    terms = (Proximal(mu),) if mu else ()
    return Method("fedprox", objective=terms, facts=Facts(extra_work="one term per step"))
