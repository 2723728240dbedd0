"""What a run gives back: accuracies in two views, costs, and models to use."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from polyfed.core.client import Client
from polyfed.core.evaluation import Row
from polyfed.errors import DataError, nearest
from polyfed.runs.checkpoint import joint_digest

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


class Result:
    """A finished run.

    Attributes:
        accuracy: ``{"seen": {domain: x}, "unseen": {domain: x}, "mean": x, "worst": x, "spread": x}``, fractions between 0 and 1.
        rows: every score of the last evaluation.
    """

    def __init__(self, experiment: Experiment, rows: Sequence[Row], path: str | None = None) -> None:
        self.experiment = experiment
        self.rows = list(rows)
        self.path = path
        self.accuracy = accuracy_table(self.rows)

    def model_for(self, client: str) -> nn.Module:
        """A copy of a seen client's own model, in eval mode."""
        known = self.experiment.backend.data
        if client not in known:
            raise DataError(f"There is no client {client!r}. {nearest(client, known)}")
        server, bench = self.experiment.server, self.experiment.bench
        at_work = Client(known[client], bench, self.experiment.backend.state_of(client), server.round)
        at_work.receive(server.outgoing(client))
        return copy.deepcopy(bench.model).to("cpu").eval()

    def newcomer(self) -> nn.Module:
        """A copy of the model for somebody never trained on, in eval mode; local layers are averaged."""
        bench = self.experiment.bench
        state = self.experiment.newcomer_state()
        bench.load({name: value for name, value in state.items() if name in bench.live})
        return copy.deepcopy(bench.model).to("cpu").eval()

    @property
    def digest(self) -> str:
        """One hash over the final state of server and clients."""
        return joint_digest(self.experiment.snapshot(), self.experiment.backend.client_digests())

    def summary(self) -> dict[str, Any]:
        """The run as one JSON object."""
        costs = self.experiment.costs
        return {
            "method": str(self.experiment.method),
            "data": self.experiment.settings.data,
            "seed": self.experiment.settings.seed,
            "rounds": self.experiment.server.round,
            "accuracy": self.accuracy,
            "test_sizes": self.experiment.test_sizes(),
            "scored_clients": self.experiment.scored_clients(),
            "scores": [{"view": r.view, "client": r.client, "domain": r.domain, **r.numbers} for r in self.rows],
            "bytes_up": costs.total("up"),
            "bytes_down": costs.total("down"),
            "bytes": costs.bytes,
            "messages": costs.messages,
            "seconds": costs.seconds.get("training", 0.0),
            "seconds_by": costs.seconds,
            "digest": self.digest,
            "run": self.path,
        }

    def __repr__(self) -> str:
        seen = ", ".join(f"{domain} {value:.3f}" for domain, value in self.accuracy["seen"].items())
        unseen = "".join(f"; unseen {domain} {value:.3f}" for domain, value in self.accuracy["unseen"].items())
        return f"<Result of {self.experiment.method}: {seen}{unseen}>"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{view}</td><td>{domain}</td><td>{value:.3f}</td></tr>"
            for view in ("seen", "unseen")
            for domain, value in self.accuracy[view].items()
        )
        return f"<table><caption>{self.experiment.method}</caption><tr><th>view</th><th>domain</th><th>accuracy</th></tr>{cells}</table>"


def accuracy_table(rows: Sequence[Row], measure: str = "accuracy") -> dict[str, Any]:
    """Both views by domain, clients of a domain by the sizes of their tests; mean, worst and spread over seen domains (over unseen ones where nothing else was scored)."""
    by: dict[str, dict[str, list[Mapping[str, float]]]] = {"seen": {}, "unseen": {}}
    for row in rows:
        if row.view in by:
            by[row.view].setdefault(row.domain, []).append(row.numbers)
    table: dict[str, Any] = {
        view: {domain: over_examples(many, measure) for domain, many in found.items()} for view, found in by.items()
    }
    values = list((table["seen"] or table["unseen"]).values())
    table["mean"] = sum(values) / len(values) if values else math.nan
    table["worst"] = min(values) if values else math.nan
    table["spread"] = max(values) - min(values) if values else math.nan
    return table


def over_examples(many: Sequence[Mapping[str, float]], measure: str) -> float:
    """The mean of several clients' scores on one domain, each by the number of its test examples."""
    largest = max(numbers["count"] for numbers in many) or 1
    # Shares of the largest: with tests of one size this is the plain mean to the bit.
    weights = [numbers["count"] / largest for numbers in many]
    total = sum(weight * float(numbers[measure]) for weight, numbers in zip(weights, many, strict=True) if weight)
    return total / sum(weights) if sum(weights) else math.nan
