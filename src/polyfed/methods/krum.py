"""(Multi-)Krum: keep the clients that lie closest to their neighbours.

    score(k) = sum of ||w_k - w_j||^2 over the n - faulty - 2 clients j nearest to k (at least one)
    the ``keep`` clients of lowest score are averaged with the run's weights; keep = 1 is Krum, more is Multi-Krum

w_k holds every uploaded entry with real numbers, concatenated. Whole clients are chosen, so their statistics and counters come with them.

Reference: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017. Defaults: faulty = 1, keep = 1.

Differences from the paper: it compares gradients, here models after local training. Integers (counters) follow the chosen clients but do not count in the
distance. Multi-Krum's mean uses the run's weights (``--weights uniform``: the paper's). The paper asks for n >= 2 faulty + 3; fewer are allowed with a
notice. No code of the authors was checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import CollectedReducer, Entries, Reduction, by_type
from polyfed.core.sharing import Rule
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.methods.median import counting, every_upload


@dataclass(frozen=True)
class Krum(CollectedReducer):
    """The mean of the clients of lowest score."""

    faulty: int
    keep: int

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        """Mean of real numbers and maximum of integers, over the chosen clients."""
        counted = counting(clients, weights)
        reduction = Reduction(by_type({name: value.dtype for entries, _ in counted for name, value in entries.items()}))
        for place in self.chosen([entries for entries, _ in counted]):
            reduction.add(*counted[place])
        return reduction.finish()

    def chosen(self, clients: Sequence[Mapping[str, Tensor]]) -> list[int]:
        """Places of the chosen clients, in the order they came."""
        if len(clients) <= self.keep:
            return list(range(len(clients)))
        scores = self.scores(squared_distances(clients))
        return sorted(scores.argsort(stable=True)[: self.keep].tolist())

    def scores(self, distances: Tensor) -> Tensor:
        """For each client, the sum of squared distances to its nearest neighbours; the nearest of all is itself."""
        neighbours = max(1, len(distances) - self.faulty - 2)
        return distances.sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1)


def squared_distances(clients: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Squared distances of all pairs, over the real entries that every client sent."""
    total = torch.zeros(len(clients), len(clients), dtype=torch.float64)
    for name, value in clients[0].items():
        if value.is_floating_point() and all(name in entries for entries in clients):
            rows = torch.stack([entries[name].flatten() for entries in clients]).double()
            total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total


@dataclass(frozen=True)
class ChooseClients(Rule):
    """Reduce by Krum, with a word where its promise does not hold."""

    def notice(self, bench: Workbench, clients: int) -> str:
        """Krum's guarantee needs enough clients."""
        faulty = self.reduce.faulty if isinstance(self.reduce, Krum) else 0
        present = bench.settings.sampled(clients)
        if present >= 2 * faulty + 3:
            return ""
        return f"krum is sure against {faulty} faulty clients with {2 * faulty + 3} or more in a round; there are {present}."


@register(shows=("faulty", "keep"))
def krum(faulty: int = 1, keep: int = 1) -> Method:
    """Keep only the clients closest to their neighbours.

    Args:
        faulty: how many clients may be faulty.
        keep: how many clients are averaged; 1 is Krum, more is Multi-Krum.
    """
    if faulty < 0 or keep < 1:
        raise OptionError(f"krum: faulty is 0 or more and keep 1 or more, found faulty={faulty}, keep={keep}.")
    rule = ChooseClients(every_upload, reduce=Krum(faulty, keep))
    facts = Facts(extra_work="the server holds every reply and compares all pairs")
    return Method("krum", sharing=(rule,), standalone=False, facts=facts)
