"""Trimmed mean: at each coordinate, leave out the largest and the smallest values.

    w_j <- mean over the clients left of (w_k)_j, after the ceil(share * K) largest and as many smallest values at j are cut

Every uploaded entry that holds real numbers, statistics too; counters take the maximum as everywhere. The mean of those left uses the run's weights.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018. share = 0.1: our choice.

Differences from the paper: it trims gradients, here models after local training. A part of a client is rounded up, so that a small federation is trimmed
at all, and at least one value is always left. The paper's mean is unweighted: ``--weights uniform``. No code of the authors was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import CollectedReducer, Entries
from polyfed.core.sharing import reduce_with
from polyfed.errors import OptionError
from polyfed.methods.median import counting, every_upload


@dataclass(frozen=True)
class TrimmedMean(CollectedReducer):
    """The weighted mean of what is left at each coordinate."""

    share: float

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        """Trimmed means; the maximum of integers."""
        chosen = counting(clients, weights)
        reduced = {}
        for name in dict.fromkeys(name for entries, _ in chosen for name in entries):
            present = [(entries[name], weight) for entries, weight in chosen if name in entries]
            rows = torch.stack([value for value, _ in present])
            reduced[name] = self.trimmed(rows, [weight for _, weight in present]) if rows.is_floating_point() else rows.amax(0)
        return reduced

    def trimmed(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        """The mean of each column without its ends."""
        cut = cut_at_each_end(self.share, len(rows))
        ordered, order = rows.sort(dim=0)
        left = slice(cut, len(rows) - cut)
        weight = torch.tensor(weights, dtype=torch.float64)[order[left]]
        mean: Tensor = (ordered[left] * weight).sum(0) / weight.sum(0)
        return mean


def cut_at_each_end(share: float, count: int) -> int:
    """How many values go at each end: rounded up (past the rounding of the product), at least one value left."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


@register(shows=("share",))
def trimmed_mean(share: float = 0.1) -> Method:
    """Average without the extreme values at each coordinate.

    Args:
        share: share of clients cut at each end, in [0, 0.5); 0 is the plain mean.
    """
    if not 0 <= share < 0.5:
        raise OptionError(f"trimmed_mean: share lies in [0, 0.5), found {share}. For the most that can be cut, use median.")
    rules = (reduce_with(every_upload, TrimmedMean(share)),) if share else ()
    return Method("trimmed_mean", sharing=rules, standalone=False, facts=Facts(extra_work="the server holds every reply"))
