"""A warning after round 1 if training goes the wrong way: the learning rate is the first thing to change."""

from __future__ import annotations

import logging
import math
import statistics
from typing import TYPE_CHECKING

from polyfed.core.server import Server
from polyfed.settings import AUTO

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")

MARGIN = 1.1
"""A random model starts a few percent above the chance level."""


class FirstLoss:
    """An observer that compares the mean training loss of round 1 with the loss of a model that knows nothing."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def __call__(self, server: Server) -> None:
        losses = self.experiment.backend.losses_of_round
        if server.round == 1 and losses and (problem := self.problem(statistics.fmean(losses.values()))):
            rate = server.settings.lr
            log.warning("%s The learning rate may be too high. Try a third of it: --lr %.2g.", problem, rate / 3)

    def problem(self, loss: float) -> str:
        """Return what is wrong with the mean training loss of round 1; empty if nothing is."""
        if not math.isfinite(loss):
            return f"The training loss is {loss} after round 1."
        start = start_of(self.experiment)
        if start is None or loss <= MARGIN * start:
            return ""
        return f"The mean training loss of round 1 is {loss:.3g}, above its start ({start:.3g}, the chance level)."


def start_of(experiment: Experiment) -> float | None:
    """Return the loss of a model that knows nothing; None if the loss is not the task's, or something is added to it."""
    method, bench = experiment.method, experiment.bench
    if (
        experiment.settings.loss != AUTO
        or "loss" in experiment.objects
        or method.task_loss
        or method.batch_gradient
        or method.objective
    ):
        return None
    return bench.task.chance_loss(bench.classes)
