"""FedProx: a quadratic pull towards the received model.

    loss_k(w) = task loss + mu/2 * ||w - w_received||^2, over the trainable parameters the server sent

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

Differences from the paper: none. Defaults: mu = 0.01 (Digits-Five in the program of FedBN; hFedF Table 10 for PACS and VLCS).
That program leaves the term out in round 1 and takes the unsquared norm on Office-Caltech-10; here the definition holds everywhere.
"""

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
    """mu/2 * ||w - w_received||^2."""

    mu: float
    reads_data = False

    def __call__(self, step: Step) -> Tensor:
        pairs = ((p, step.client.received[name]) for name, p in step.client.shared_parameters())
        return self.mu / 2 * torch.stack([(p - w).square().sum() for p, w in pairs]).sum()

    def check(self, bench: Workbench) -> None:
        """Without a shared parameter there is nothing to be pulled to."""
        sent = {name for phase in bench.plan.phases.values() for name in phase.down}
        if not sent & set(bench.parameters):
            raise JoinError(f"{bench.method}: no parameter is sent to clients, so fedprox would be ignored. Leave it out.")


@register(shows=("mu",))
def fedprox(mu: float = 0.01) -> Method:
    """Pull each client towards the model it received.

    Args:
        mu: strength of the pull; 0 is FedAvg.
    """
    if mu < 0:
        raise OptionError(f"fedprox: mu must not be negative, found {mu}.")
    terms = (Proximal(mu),) if mu else ()
    return Method("fedprox", objective=terms, facts=Facts(extra_work="one term per step"))
