"""How much the weights of clients' models differ, layer by layer (hFedF Figure 5).

deviation   of each value over clients, averaged over the values of the entry
relative    the same, as a share of the root mean square of the entry's values
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from polyfed.core.sharing import bn_statistics
from polyfed.errors import DataError
from polyfed.runs.callbacks.training_metrics import Moments
from polyfed.runs.experiment import Experiment
from polyfed.studies.analyse.local_models import State, states_as_tested


@dataclass(frozen=True)
class EntrySpread:
    """The deviation over clients of one entry of the model."""

    entry: str
    kind: str
    values: int
    deviation: float
    relative: float


def layer_spread(experiment: Experiment, states: Iterable[tuple[str, State]] | None = None) -> list[EntrySpread]:
    """The standard deviation across clients' models of every entry; counters and running statistics are left out.

    Args:
        experiment: a run of at least two clients.
        states: clients' models; default: those they are tested with.
    """
    if len(experiment.server.ids) < 2:
        raise DataError(f"The run has one client ({experiment.server.ids[0]}), and a deviation needs two.")
    entries = experiment.bench.plan.entries
    names = [n for n, e in entries.items() if e.of is None and e.dtype.is_floating_point and not bn_statistics.matches(e)]
    moments = Moments()
    for _, state in states_as_tested(experiment) if states is None else states:
        moments.add({name: state[name] for name in names})
    return [_spread(moments, name, entries[name].kind) for name in names]


def _spread(moments: Moments, name: str, kind: str) -> EntrySpread:
    deviations, squares, count = 0.0, 0.0, moments.mean[name].numel()
    for mean, variance in moments.in_parts(name):
        deviations += float(variance.double().sqrt().sum())
        squares += float((mean.double().square() + variance.double()).sum())
    deviation = deviations / count
    return EntrySpread(name, kind, count, deviation, deviation / max(math.sqrt(squares / count), 1e-30))
