"""What every round of training writes to the metrics, and a warning after round 1 if the loss is above the chance level."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyfed.core.privacy import account_of
from polyfed.core.server import Server
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.callbacks.client_spread import SPREAD, spread_lines
from polyfed.runs.callbacks.statistics_drift import STATISTICS, StatisticsDrift
from polyfed.settings import AUTO

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")

NOTED = "noted"
"""The view of what a method logs in a round (``server.note``)."""
OF_TRAINING = ("training", SPREAD, STATISTICS, NOTED)
"""Views of metrics that training writes; the others are scores."""
MARGIN = 1.1
"""A random model starts a few percent above the chance level."""


class TrainingMetrics(Callback):
    """Write losses, privacy spending, the spread of client models, the drift of statistics and the method's notes."""

    def __init__(self, run: ActiveRun) -> None:
        self.run, self.experiment = run, run.experiment
        if run.folder is not None:
            self.drift = StatisticsDrift(self.experiment.bench.plan, self.experiment.server, self.experiment.backend)
            self.experiment.on_reply = self.drift.hear

    def after_round(self, run: RunState) -> None:
        self._warn_of_loss(run)
        if self.run.folder is None:
            return
        server, backend = self.experiment.server, self.experiment.backend
        account = account_of(server)
        self.run.write(
            [
                *({"round": run.round, "view": "training", "client": name, "loss": loss} for name, loss in run.losses.items()),
                *(_privacy_lines(run.round, account) if account is not None else ()),
                *spread_lines(server, backend, self.experiment.bench.initial),
                *self.drift.lines(server, backend),
                *_noted_lines(server),
            ]
        )

    def _warn_of_loss(self, run: RunState) -> None:
        if run.round != 1 or not run.losses:
            return
        loss, start = statistics.fmean(run.losses.values()), start_of(self.experiment)
        if not math.isfinite(loss):
            problem = f"The training loss is {loss} after round 1."
        elif start is not None and loss > MARGIN * start:
            problem = f"The mean training loss of round 1 is {loss:.3g}, above its start ({start:.3g}, the chance level)."
        else:
            return
        log.warning("%s The learning rate may be too high. Try a third of it: --lr %.2g.", problem, run.settings.lr / 3)


def start_of(experiment: Experiment) -> float | None:
    """Return the loss of a model that knows nothing; None if the loss is not the task's, or something is added to it."""
    method, bench = experiment.method, experiment.bench
    changed = experiment.settings.loss != AUTO or "loss" in experiment.objects
    if changed or method.task_loss or method.batch_gradient or method.objective:
        return None
    return bench.task.chance_loss(bench.classes)


def _noted_lines(server: Server) -> list[Mapping[str, Any]]:
    by_client: dict[str, dict[str, Any]] = {}
    for name, values in server.notes.items():
        for client, value in values.items():
            by_client.setdefault(client, {})[name] = value
    return [{"round": server.round, "view": NOTED, "client": client, **values} for client, values in by_client.items()]


def _privacy_lines(number: int, account: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    common = {"round": number, "view": "privacy", "privacy.delta": account["delta"]}
    each = [
        {**common, "client": client, "privacy.epsilon_spent": found["epsilon_spent"]}
        for client, found in account["clients"].items()
    ]
    return [*each, {**common, "client": "all", "privacy.epsilon_spent": account["epsilon_spent"]}]
