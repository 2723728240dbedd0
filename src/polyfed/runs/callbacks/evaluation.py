"""When a run is scored, which round is selected, and whether the run stops early.

A run may select the round with the best validation scores of the source clients, by its primary metric. The best state so far is saved
next to the checkpoints (``best/``). A resumed run restores it. If a later round has overwritten it, the run repeats that round and finds
the same state. If it was lost for another reason, the run fails, so that no other model is reported as the best one.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.evaluation import Row, scored_clients
from polyfed.core.method import Method
from polyfed.core.privacy import ACCOUNTS, account_keys
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError, TooFewReplies
from polyfed.runs.callbacks.callback import ActiveRun, Callback, RunState
from polyfed.runs.folder.checkpoint import Checkpoints, Snapshot, copied
from polyfed.runs.folder.manifest import Damaged
from polyfed.runs.scores import BEST_LOCAL_VALIDATION, BEST_VALIDATION, as_line, mean_rows, scored_rounds
from polyfed.settings import AUTO
from polyfed.tasks.known import value_by
from polyfed.tasks.metrics import IN_DETAIL

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
            # The metrics do not contain predictions for single images, so score again, without counting the cost.
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
    """Return True every n rounds and in the last round (neither if n is 0), and in the last ``at_end`` rounds."""
    return (bool(every and number) and (number % every == 0 or number == rounds)) or number > max(0, rounds - at_end)


class BestValidation(Callback):
    """Score validation data every ``evaluate_every`` rounds (0: every round), and save the best state."""

    def __init__(self, run: ActiveRun, notes: Mapping[str, Any] | None = None) -> None:
        self.run, self.experiment = run, run.experiment
        self.checkpoints: Checkpoints | None = None if run.folder is None else run.folder.best
        self.value = float(notes["value"]) if notes else -math.inf
        self.round = int(notes["round"]) if notes else 0
        self.best: Snapshot | None = None
        if notes and self.checkpoints is not None:
            try:
                self.best = self.checkpoints.read_round(self.round)
            except Damaged as damage:
                raise self._lost(str(damage)) from damage
        if self.best is not None:
            self.experiment.backend.retain("best", self.best.clients)

    def after_round(self, run: RunState) -> None:
        if is_turn(run.round, run.rounds, run.settings.evaluate_every or 1):
            rows = self.score_round()
            self.run.scores, self.run.scored_round = rows, self.experiment.server.round
            self.run.write_scores(rows)

    def _lost(self, reason: str) -> RunFolderError:
        assert self.run.folder is not None
        path = self.run.folder.path
        return RunFolderError(
            f"The best state of {path} so far (round {self.round}) is lost: {reason} Restart with another --out, "
            f"or start another run from its last state (--init {path})."
        )

    def score_round(self) -> list[Row]:
        """Score the current state on validation data, and save it if it is the best so far.

        Rounds in which a client did not reply are not compared, because their mean is over other clients.
        """
        rows = self.scores()
        silent = sorted(set(self.scored) - {row.client for row in rows})
        if silent:
            log.warning(
                "Round %d cannot be selected: no validation scores from %s.",
                self.experiment.server.round,
                ", ".join(silent),
            )
            return rows
        value = self.mean(rows)
        if value > self.value:
            self.value, self.round = value, self.experiment.server.round
            self.best = copied(self.experiment.snapshot())
            self.experiment.backend.retain("best")
            if self.checkpoints is not None:
                self.checkpoints.write(self.best, set(self.best.clients))
        return rows

    @property
    def scored(self) -> list[str]:
        """Clients whose validation scores are averaged."""
        return scored_clients(self.experiment.server, "validation")

    def scores(self) -> list[Row]:
        """Return the validation scores of the current models, after averaging."""
        return list(self.experiment.score("validation"))

    def mean(self, rows: Sequence[Row]) -> float:
        """Return the value that rounds are compared by: the unweighted mean over clients."""
        return sum(self.value_of(row) for row in rows) / len(rows)

    def value_of(self, row: Row) -> float:
        return value_by(self.experiment.bench.measure, row.numbers, row.client, row.view)

    def notes(self) -> dict[str, Any] | None:
        """Return the checkpoint notes about the best state so far."""
        return {"round": self.round, "value": self.value} if self.round else None

    def restore_best(self) -> None:
        """Replace the last state with the best one; costs and the number of rounds remain those of the whole run."""
        if not self.round:
            self.score_round()
        if not self.round:
            raise TooFewReplies(
                f"{self.experiment.settings.selection} needs a round in which all {len(self.scored)} clients report validation scores, "
                "and there was none. Resume the run when all clients are available; its last round will be evaluated again."
            )
        if self.best is None:
            assert self.checkpoints is not None
            raise self._lost(f"{self.checkpoints.folder} contains only later rounds, which the run did not reproduce.")
        server, backend = self.experiment.server, self.experiment.backend
        # Later rounds have spent privacy budget, whichever model is kept.
        clients = _with_accounts(server.method, self.best.clients, backend.client_states)
        accounts = {name: value for name, value in server.memory_state().items() if name == ACCOUNTS}
        server.state, server.memory, server.restored_memory = dict(self.best.state), {}, {**self.best.memory, **accounts}
        backend.client_states = clients
        backend.changed = set(backend.client_states)


class BestLocalValidation(BestValidation):
    """Compare rounds by the local models, before averaging, weighted by training size; the averaged model is saved."""

    @property
    def scored(self) -> list[str]:
        """All clients, because rounds with different clients are not comparable."""
        return self.experiment.server.client_ids

    def scores(self) -> list[Row]:
        """Return the scores of clients at the end of local training."""
        data = self.experiment.backend.data
        scored, measure = self.experiment.backend.validations_of_round, self.experiment.bench.measure
        return [
            Row("local_validation", client, "+".join(data[client].domains), {measure: value}) for client, value in scored.items()
        ]

    def mean(self, rows: Sequence[Row]) -> float:
        """Return the mean over clients, weighted by training samples."""
        samples = {info.id: info.samples for info in self.experiment.server.clients}
        return sum(samples[row.client] * self.value_of(row) for row in rows) / sum(samples[row.client] for row in rows)


def _with_accounts(method: Method, chosen: Mapping[str, ClientState], last: Mapping[str, ClientState]) -> dict[str, ClientState]:
    """Return the client states of the selected round with the privacy ledgers of the last round."""
    found, keys = dict(chosen), account_keys(method)
    for client, state in last.items() if keys else ():
        account = {key: state.memory[key] for key in keys if key in state.memory}
        if account:
            before = found.get(client) or ClientState()
            found[client] = ClientState(before.entries, before.memory | account)
    return found


SELECTIONS = {BEST_VALIDATION: BestValidation, BEST_LOCAL_VALIDATION: BestLocalValidation}
