"""FedDNA-lite, an approximation of FedDNA. Do not report its results as FedDNA's. Differences from the paper: docs/methods/feddna.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.entries import STATISTIC
from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import CollectedReducer, Entries
from polyfed.core.sharing import Select, reduce_with
from polyfed.errors import OptionError
from polyfed.methods._shared import require_choice

MERGES = ("importance", "moments")
EPS = 1e-5
MOMENTS = Select("batch-norm means and variances", kinds=frozenset({STATISTIC}), layers=frozenset({"batch_norm"}))


def divergence(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """Return the mean of both Kullback-Leibler divergences between two Gaussians, per channel."""
    a, b = variance + EPS, other_variance + EPS
    return (a / b + b / a) / 4 + (mean - other_mean).square() * (1 / a + 1 / b) / 4 - 0.5


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, name.removesuffix("mean") + "var") for name in names if name.endswith("running_mean")]


def mixed(clients: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Entries:
    return {name: torch.einsum("k,k...->...", weights, torch.stack([c[name] for c in clients])) for name in clients[0]}


def in_double(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> tuple[list[Entries], Tensor]:
    """Return the clients' values and normalised weights, in double precision."""
    shares = torch.tensor(weights, dtype=torch.float64)
    return [{name: value.double() for name, value in client.items()} for client in clients], shares / shares.sum()


@dataclass(frozen=True)
class Importance(CollectedReducer):
    """Reduce statistics with weights that decrease with the distance from the weighted mean."""

    tau: float
    iterations: int

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        exact, shares = in_double(clients, weights)
        merged = mixed(exact, shares)
        for _ in range(self.iterations):
            merged = mixed(exact, torch.softmax(-torch.stack([self.distance(c, merged) for c in exact]) / self.tau, dim=0))
        return merged

    def distance(self, client: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> Tensor:
        """Return the divergence of one client, averaged over the channels of all layers."""
        found = [divergence(client[m], client[v], merged[m], merged[v]) for m, v in pairs(list(client))]
        return torch.cat(found).mean()


@dataclass(frozen=True)
class Moments(CollectedReducer):
    """Reduce statistics to the mean and variance of the mixture of the clients' distributions."""

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        exact, shares = in_double(clients, weights)
        merged = mixed(exact, shares)
        for mean, variance in pairs(list(merged)):
            spread = mixed([{mean: (client[mean] - merged[mean]).square()} for client in exact], shares)
            merged[variance] = merged[variance] + spread[mean]
        return merged


@register
def feddna(merge: str = "importance", tau: float = 1.0, iterations: int = 3) -> Method:
    """Aggregate batch-norm statistics separately, by importance or as exact moments (an approximation of FedDNA).

        S <- sum_k p_k S_k;   then, ``iterations`` times:
            d_k = mean over all channels of (KL(N_k || N) + KL(N || N_k)) / 2,    N_k = Gaussian(mu_k, sigma2_k) of a channel
            a = softmax(-d / tau);   S <- sum_k a_k S_k

        merge="moments":   mu = sum_k p_k mu_k,   sigma2 = sum_k p_k (sigma2_k + (mu_k - mu)^2)

    Args:
        merge: importance (larger weights for statistics near the mean), or moments (exact mean and variance of the mixture).
        tau: temperature of the importance weights; large values give uniform weights.
        iterations: number of alternating updates of weights and statistics; 0 is FedAvg.

    Reference:
        J.-H. Duan et al. FedDNA: Federated Learning with Decoupled Normalization-Layer Aggregation for Non-IID Data. ECML PKDD
        2021.
    """
    require_choice("feddna", "merge", merge, MERGES)
    if tau <= 0:
        raise OptionError(f"feddna: tau must be positive, got {tau}.")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise OptionError(f"feddna: iterations must be an integer of at least 0, got {iterations!r}.")
    neutral = merge == "importance" and iterations == 0
    reducer = Moments() if merge == "moments" else Importance(tau, iterations)
    return Method("feddna", sharing=() if neutral else (reduce_with(MOMENTS, reducer),), facts=Facts(batch_norm=True))
