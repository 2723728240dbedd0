"""Which round's model a run ends with: the last one, or the one with the best mean validation accuracy of the source clients.

The best state so far is kept beside the checkpoints (``best/``). A resumed run takes it up again; where it was overwritten by a
later round, the run passes through that round again and finds the same state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyfed.checkpoint import Checkpoints, Snapshot, copied
from polyfed.evaluation import Row

if TYPE_CHECKING:
    from polyfed.experiment import Experiment

BEST_VALIDATION = "best_validation"


class BestValidation:
    """Looks at validation data now and then, and remembers the best state."""

    def __init__(self, experiment: Experiment, checkpoints: Checkpoints | None, notes: Mapping[str, Any] | None = None) -> None:
        self.experiment, self.checkpoints = experiment, checkpoints
        self.value = float(notes["value"]) if notes else -math.inf
        self.round = int(notes["round"]) if notes else 0
        self.best: Snapshot | None = checkpoints.read_round(self.round) if notes and checkpoints is not None else None
        if self.best is not None:
            experiment.delivery.hold("best", self.best.clients)

    def look(self) -> list[Row]:
        """Score the present state on validation data; keep it if it is the best so far."""
        rows = self.experiment.evaluate(split="validation")
        value = sum(row.numbers["accuracy"] for row in rows) / len(rows)
        if value > self.value:
            self.value, self.round = value, self.experiment.server.round
            self.best = copied(self.experiment.snapshot())
            self.experiment.delivery.hold("best")
            if self.checkpoints is not None:
                self.checkpoints.write(self.best, set(self.best.clients))
        return rows

    def notes(self) -> dict[str, Any] | None:
        """What a checkpoint says about the best state so far."""
        return {"round": self.round, "value": self.value} if self.round else None

    def take(self) -> None:
        """Put the best state in the place of the last one; costs and the number of rounds stay those of the whole run."""
        if self.best is None:
            return
        server, delivery = self.experiment.server, self.experiment.delivery
        server.state, server.memory, server.dormant = dict(self.best.state), {}, dict(self.best.memory)
        delivery.kept = dict(self.best.clients)
        delivery.changed = set(delivery.kept)
