"""When a run is scored, which scores are final, and whether it stops early."""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.core.evaluation import Row, scored_clients
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.scores import as_line, mean_rows, scored_rounds
from polyfed.settings import AUTO
from polyfed.tasks.known import value_by
from polyfed.tasks.metrics import IN_DETAIL

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun
    from polyfed.runs.callbacks.selection import BestValidation

log = logging.getLogger("polyfed")

VALIDATION = "validation"


class Evaluation(Callback):
    """Score test data every ``evaluate_every`` rounds, after the last rounds and at the end."""

    def __init__(self, run: ActiveRun, selection: BestValidation | None) -> None:
        self.run, self.selection = run, selection
        self.scored_before = bool(run.scores)

    def after_round(self, run: RunState) -> None:
        every = 0 if self.selection is not None else run.settings.evaluate_every
        if is_turn(run.round, run.rounds, every, run.settings.scored_at_end):
            self.evaluate()

    def evaluate(self, ends: bool = False) -> Sequence[Row]:
        """Score the current state once, and write the scores to the metrics. ``ends`` marks the final round, planned or not."""
        run, experiment = self.run, self.run.experiment
        number, averaged = experiment.server.round, experiment.settings.averaged_rounds
        is_final = ends or number > experiment.server.rounds - max(1, averaged)
        if number not in run.by_round:
            # The final model is scored in detail: that of the last round, unless another round is selected.
            run.by_round[number] = run.score(in_detail=is_final and self.selection is None)
            run.write_scores(run.by_round[number])
        elif ends and self.scored_before and self.selection is None:
            # The metrics do not contain predictions for single images, so score again, but not at the cost of the run.
            costs = copy.deepcopy(experiment.costs)
            run.score(in_detail=True)
            experiment.costs = costs
        if self.selection is None:  # otherwise callbacks receive the validation scores
            run.scores, run.scored_round = run.by_round[number], number
        return run.by_round[number]

    def final_rows(self) -> Sequence[Row]:
        """Return the scores of the final model."""
        run, settings = self.run, self.run.experiment.settings
        number, averaged = run.experiment.server.round, settings.averaged_rounds
        if self.selection is not None:
            self.selection.restore_best()
            run.scores, selected = run.score(in_detail=True), self.selection.round
        elif averaged:
            self.evaluate(ends=True)
            averaged_over = {n: rows for n, rows in run.by_round.items() if n > number - averaged}
            if len(averaged_over) < min(averaged, number):
                log.warning(
                    "%s: the run stopped early, after round %d. Scores are the mean of %d of its last %d rounds.",
                    settings.selection,
                    number,
                    len(averaged_over),
                    averaged,
                )
            run.scores, selected = mean_rows(averaged_over), number
        else:
            return self.evaluate(ends=True)
        run.write([{**as_line(number, row), "view": f"selected_{row.view}", "selected_round": selected} for row in run.scores])
        return run.scores


class EarlyStopping(Callback):
    """Stop the run when a metric on validation data has not improved for ``patience`` evaluations (``--early-stopping``).

    The metrics contain the validation scores, so a resumed run has those of earlier rounds. All clients have the same weight. Rounds in
    which a client did not reply are ignored.
    """

    def __init__(self, run: ActiveRun, metric: str, patience: int) -> None:
        self.run, self.patience = run, patience
        self.metric = run.experiment.bench.measure if metric == AUTO else metric
        self.best, self.waited = -math.inf, 0
        for rows in scored_rounds(run.history, VALIDATION).values():
            self._take(rows)

    def begin(self, run: RunState) -> bool:
        return self.waited >= self.patience

    def after_round(self, run: RunState) -> bool:
        if not is_turn(run.round, run.rounds, run.settings.evaluate_every or 1):
            return False
        rows = self.run.scores
        if self.run.scored_round != run.round or any(row.view != VALIDATION or self.metric not in row.numbers for row in rows):
            rows = self.run.experiment.evaluate(VALIDATION, in_detail=self.metric in IN_DETAIL)
            self.run.write_scores(rows)
        self._take(rows)
        return self.waited >= self.patience

    def _take(self, rows: Sequence[Row]) -> None:
        if {row.client for row in rows} < set(scored_clients(self.run.experiment.server, VALIDATION)):
            return
        value = statistics.fmean(value_by(self.metric, row.numbers, row.client, row.view) for row in rows)
        self.best, self.waited = max(value, self.best), 0 if value > self.best else self.waited + 1


def is_turn(number: int, rounds: int, every: int, at_end: int = 0) -> bool:
    """Return True for every n-th round (0: none) and then for the last one, and for the last ``at_end`` rounds."""
    return (bool(every and number) and (number % every == 0 or number == rounds)) or number > max(0, rounds - at_end)
