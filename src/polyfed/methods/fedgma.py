"""FedGMA: gradient-masked averaging. Differences from the paper: docs/methods/fedgma.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.entries import AFFINE, HEAD, MIX, WEIGHT
from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import Entries, Folding, Largest, Mean
from polyfed.core.sharing import Select, reduce_with
from polyfed.errors import OptionError
from polyfed.methods._shared import require_choice

VARIANTS = ("masked_delta", "average_plus_step")
PARAMETERS = Select("parameters", kinds=frozenset({WEIGHT, HEAD, AFFINE, MIX}))


@dataclass(frozen=True)
class MaskedMean:
    """Reduce to the weighted mean, with changes scaled by the agreement of the clients' signs."""

    tau: float
    server_lr: float
    variant: str

    def start(self, reference: Mapping[str, Tensor]) -> Folding:
        return _MaskedFolding(self, reference)

    def combine(self, start: Tensor, mean: Tensor, agreement: Tensor) -> Tensor:
        """Return the new value, given the current one, the client mean, and the agreement A."""
        step = torch.where(agreement >= self.tau, 1.0, agreement) * self.server_lr
        if self.variant == "average_plus_step":
            step = step + 1
        # lerp returns exactly the mean if the step is 1, so full agreement is bit-identical to FedAvg.
        return start.to(mean.dtype).lerp(mean, step.to(mean.dtype))


class _MaskedFolding:
    """Running mean and running sum of signs per coordinate: two models in memory for any number of clients."""

    def __init__(self, reducer: MaskedMean, reference: Mapping[str, Tensor]) -> None:
        self.reducer, self.reference = reducer, reference
        self.mean, self.largest = Mean().start(reference), Largest().start(reference)
        self.signs: Entries = {}
        self.clients = 0

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        floats = {name: value for name, value in entries.items() if value.is_floating_point()}
        self.largest.add({name: value for name, value in entries.items() if name not in floats}, weight)
        if weight <= 0:
            return
        self.mean.add(floats, weight)
        self.clients += 1
        for name, value in floats.items():
            sign = torch.sign(value - self.reference[name]).float()
            self.signs[name] = self.signs[name] + sign if name in self.signs else sign

    def finish(self) -> Entries:
        means = self.mean.finish()
        masked = {
            name: self.reducer.combine(self.reference[name], mean, self.signs[name].abs() / self.clients)
            for name, mean in means.items()
        }
        return masked | self.largest.finish()


@register(shows=("tau",))
def fedgma(tau: float = 0.7, server_lr: float = 1.0, variant: str = "masked_delta") -> Method:
    """Reduce changes on which clients disagree: average updates with a mask of sign agreement.

        d_k = theta_k - theta                        change of client k
        A   = | (1/K) sum_k sign(d_k) |              agreement per coordinate: 1 if all signs are equal
        m   = 1 where A >= tau, otherwise A

        masked_delta        theta <- theta + server_lr * m * sum_k p_k d_k
        average_plus_step   theta <- theta + (1 + server_lr * m) * sum_k p_k d_k        FedAvg, then a masked step along the same update

    Args:
        tau: smallest agreement at which a coordinate takes the full step, between 0 and 1; 0 is FedAvg.
        server_lr: learning rate of the server for the masked update.
        variant: masked_delta (the definition), or average_plus_step (FedAvg, then an extra masked step).

    Reference:
        I. Tenison et al. Gradient Masked Averaging for Federated Learning. TMLR 2023.
    """
    if not 0 <= tau <= 1:
        raise OptionError(f"fedgma: tau must be between 0 and 1, got {tau}.")
    if server_lr < 0:
        raise OptionError(f"fedgma: server_lr must not be negative, got {server_lr}.")
    require_choice("fedgma", "variant", variant, VARIANTS)
    neutral = (tau == 0 and server_lr == 1) if variant == "masked_delta" else server_lr == 0
    rules = () if neutral else (reduce_with(PARAMETERS, MaskedMean(tau, server_lr, variant)),)
    return Method("fedgma", sharing=rules, facts=Facts(extra_work="" if neutral else "one sum of signs at the server"))
