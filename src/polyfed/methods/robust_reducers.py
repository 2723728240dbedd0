"""Robust reducers: median, trimmed mean and Krum. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.entries import Entry
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.reducers import CollectedReducer, Entries, Reduction, by_type
from polyfed.core.sharing import Rule, Select, reduce_with
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError


@dataclass(frozen=True)
class EveryUpload(Select):
    """Selects all uploaded entries, including optimizer buffers."""

    def matches(self, entry: Entry) -> bool:
        return True


every_upload = EveryUpload("every uploaded entry")


def _counting(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> list[tuple[Mapping[str, Tensor], float]]:
    return [(entries, weight) for entries, weight in zip(clients, weights, strict=True) if weight > 0]


class CoordinateReducer(CollectedReducer):
    """Reduce each coordinate separately over the clients that sent the entry; integers use the maximum."""

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        chosen = _counting(clients, weights)
        reduced = {}
        for name in dict.fromkeys(name for entries, _ in chosen for name in entries):
            present = [(entries[name], weight) for entries, weight in chosen if name in entries]
            rows = torch.stack([value for value, _ in present])
            reduced[name] = self.reduced(rows, [weight for _, weight in present]) if rows.is_floating_point() else rows.amax(0)
        return reduced

    def reduced(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        """Return one value per column; each row is a client."""
        raise NotImplementedError


@dataclass(frozen=True)
class Median(CoordinateReducer):
    def reduced(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        ordered, count = rows.sort(dim=0).values, len(rows)
        return torch.lerp(ordered[(count - 1) // 2], ordered[count // 2], 0.5)


@register
def median() -> Method:
    """Take the coordinate-wise median of the clients' models.

        w_j <- median over clients k of (w_k)_j          for an even number of clients: the mean of the two middle values

    Reference:
        D. Yin et al. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
    """
    return Method(
        "median",
        sharing=(reduce_with(every_upload, Median()),),
        standalone=False,
        facts=Facts(extra_work="the server holds every reply"),
    )


@dataclass(frozen=True)
class TrimmedMean(CoordinateReducer):
    share: float

    def reduced(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        cut = cut_at_each_end(self.share, len(rows))
        ordered, order = rows.sort(dim=0)
        left = slice(cut, len(rows) - cut)
        weight = torch.tensor(weights, dtype=torch.float64)[order[left]]
        mean: Tensor = (ordered[left] * weight).sum(0) / weight.sum(0)
        return mean


def cut_at_each_end(share: float, count: int) -> int:
    """Return the number of values to discard at each end: rounded up, with at least one value left."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


@register(shows=("share",))
def trimmed_mean(share: float = 0.1) -> Method:
    """Average without the extreme values of each coordinate.

        w_j <- mean over the remaining clients of (w_k)_j, after discarding the ceil(share * K) largest and smallest values at j

    Args:
        share: fraction of clients discarded at each end, in [0, 0.5); 0 is the plain mean.

    Reference:
        D. Yin et al. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
    """
    if not 0 <= share < 0.5:
        raise OptionError(f"trimmed_mean: share must be in [0, 0.5), got {share}. To discard as much as possible, use median.")
    rules = (reduce_with(every_upload, TrimmedMean(share)),) if share else ()
    return Method("trimmed_mean", sharing=rules, standalone=False, facts=Facts(extra_work="the server holds every reply"))


@dataclass(frozen=True)
class Krum(CollectedReducer):
    """Reduce to the mean of the clients with the lowest scores."""

    faulty: int
    keep: int

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        counted = _counting(clients, weights)
        reduction = Reduction(by_type({name: value.dtype for entries, _ in counted for name, value in entries.items()}))
        for place in self.chosen([entries for entries, _ in counted]):
            reduction.add(*counted[place])
        return reduction.finish()

    def chosen(self, clients: Sequence[Mapping[str, Tensor]]) -> list[int]:
        """Return the positions of the selected clients, in the given order."""
        if len(clients) <= self.keep:
            return list(range(len(clients)))
        scores = self.scores(squared_distances(clients))
        return sorted(scores.argsort(stable=True)[: self.keep].tolist())

    def scores(self, distances: Tensor) -> Tensor:
        """Return the sum of squared distances from each client to its nearest neighbours, excluding itself."""
        neighbours = max(1, len(distances) - self.faulty - 2)
        return distances.sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1)


def squared_distances(clients: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return squared distances of all pairs, over the floating-point entries that every client sent."""
    total = torch.zeros(len(clients), len(clients), dtype=torch.float64)
    for name, value in clients[0].items():
        if value.is_floating_point() and all(name in entries for entries in clients):
            rows = torch.stack([entries[name].flatten() for entries in clients]).double()
            total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total


@dataclass(frozen=True)
class ChooseClients(Rule, Part):
    """Reduce with Krum; print a notice if its guarantee does not hold."""

    def notice(self, bench: Workbench, clients: int) -> str:
        faulty = self.reduce.faulty if isinstance(self.reduce, Krum) else 0
        present = bench.settings.sampled(clients)
        if present >= 2 * faulty + 3:
            return ""
        return f"krum tolerates {faulty} faulty clients only with {2 * faulty + 3} or more clients per round; there are {present}."


@register(shows=("faulty", "keep"))
def krum(faulty: int = 1, keep: int = 1) -> Method:
    """Keep only the clients closest to their neighbours.

        score(k) = sum of ||w_k - w_j||^2 over the n - faulty - 2 clients j nearest to k (at least one)
        w <- mean of the `keep` clients of lowest score

    Args:
        faulty: number of faulty clients to tolerate.
        keep: number of clients to average; 1 is Krum, more is Multi-Krum.

    Reference:
        P. Blanchard et al. Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent. NeurIPS 2017.
    """
    if faulty < 0 or keep < 1:
        raise OptionError(f"krum: faulty must be at least 0 and keep at least 1, got faulty={faulty}, keep={keep}.")
    rule = ChooseClients(every_upload, reduce=Krum(faulty, keep))
    facts = Facts(extra_work="the server holds every reply and compares all pairs")
    return Method("krum", sharing=(rule,), standalone=False, facts=facts)
