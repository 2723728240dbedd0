"""Select the round with the best validation scores of the source clients, by the metric of the run.

The best state so far is saved next to the checkpoints (``best/``). A resumed run restores it. If a later round has overwritten it, the
run repeats that round and finds the same state. If it was lost for another reason, the run fails, so that no other model is reported as
the best one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.core.evaluation import Row, scored_clients
from polyfed.core.method import Method
from polyfed.core.privacy import ACCOUNTS, account_keys
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError, TooFewReplies
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.callbacks.evaluation import is_turn
from polyfed.runs.folder.checkpoint import Checkpoints, Snapshot, copied
from polyfed.runs.folder.manifest import Damaged
from polyfed.runs.scores import BEST_LOCAL_VALIDATION, BEST_VALIDATION
from polyfed.tasks.known import value_by

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun

log = logging.getLogger("polyfed")


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
