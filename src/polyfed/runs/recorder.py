"""What a run records while it trains: metrics and checkpoints. A run with a folder survives being killed at any instant.

A checkpoint is taken between two rounds and written in the background while the next one trains. At most one is pending; whatever
ends the run waits for it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.evaluation import Row
from polyfed.core.method import Method
from polyfed.core.privacy import account_of
from polyfed.core.server import Server
from polyfed.core.slots import SLOTS
from polyfed.core.workbench import ClientState
from polyfed.costs.resource_meter import LEFT_BEHIND, Meter, trains_in_this_process
from polyfed.errors import RunFolderError
from polyfed.runs.answers_file import Answers
from polyfed.runs.background_task import BackgroundTask
from polyfed.runs.best_round import chooser_of
from polyfed.runs.client_spread import SPREAD, spread_lines
from polyfed.runs.experiment import Experiment
from polyfed.runs.last_rounds import mean_rows, scored_rounds
from polyfed.runs.run_folder import RunFolder
from polyfed.runs.statistics_drift import STATISTICS, StatisticsDrift

log = logging.getLogger("polyfed")

NOTED = "noted"
"""The view of what a method logs in a round (``server.note``)."""
OF_TRAINING = ("training", SPREAD, STATISTICS, NOTED)
"""Views of metrics that training writes; the others are scores."""


@dataclasses.dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written: of which round, and what the backend must know when that succeeds, or fails."""

    round: int
    changed: set[str]
    marks: Mapping[str, ClientState]


class Recorder:
    """Evaluates when it is time, writes metrics, then checkpoints: in this order, so that a checkpoint knows how many metrics belong to it."""

    def __init__(
        self, experiment: Experiment, folder: RunFolder | None, split: str = "test", best: Mapping[str, Any] | None = None
    ) -> None:
        self.experiment, self.folder, self.split = experiment, folder, split
        if folder is not None:
            folder.begin_sealing()
        self.selection = chooser_of(experiment, None if folder is None else folder.best, best)
        self.last_saved = time.monotonic()
        self.background = BackgroundTask()
        self.pending: PendingCheckpoint | None = None
        self.saved = -1
        self.copied_bytes = 0
        self.meter = Meter(trains_in_this_process(experiment.settings), background=lambda: self.background.cpu_seconds)
        # A run that was stopped after its last round was scored, and before its end, has these scores already.
        self.by_round: dict[int, list[Row]] = {} if folder is None else scored_rounds(folder.metrics(), split)
        number, is_last = experiment.server.round, experiment.server.round == experiment.server.rounds
        self.rows: list[Row] = self.by_round.get(number, []) if is_last else []
        self.rows_of_round = number if self.rows else -1
        self.scored_before = bool(self.rows)
        self.answers: Answers = {}
        self.complete = -1
        self.drift = StatisticsDrift(experiment.bench.plan, experiment.server, experiment.backend)

    def __call__(self, server: Server) -> None:
        self.meter.pause(self.experiment.costs)
        if not self.background.busy:
            self.conclude()
        if self.folder is not None and server.round == 0:
            self.save()  # before any line of metrics, so that lines without a checkpoint show that one was lost
        losses = self.experiment.backend.losses_of_round
        if server.round and losses:
            self.write(
                [{"round": server.round, "view": "training", "client": client, "loss": loss} for client, loss in losses.items()]
            )
        if server.round and (account := account_of(server)) is not None:
            self.write(privacy_lines(server.round, account))
        if self.folder is not None and server.round:
            self.write(spread_lines(server, self.experiment.backend, self.experiment.bench.initial))
            self.write([*self.drift.lines(server, self.experiment.backend), *noted_lines(server)])
        every = server.settings.evaluate_every
        if self.selection is not None and is_turn(server.round, server.rounds, every or 1):
            self.rows, self.rows_of_round = self.selection.look(), server.round
            self.write([as_line(server.round, row) for row in self.rows])
        if is_turn(server.round, server.rounds, 0 if self.selection is not None else every, server.settings.scored_at_end):
            self.evaluate()
        if self.folder is not None and server.round and self.is_time(server):
            self.save()
        self.complete = server.round
        self.meter.go_on(measure_memory=not self.background.busy or self.copied_bytes < LEFT_BEHIND)

    def is_time(self, server: Server) -> bool:
        """Whether a checkpoint is due; the state before round 1 is always saved. Seconds are no reason to wait for the one before."""
        every = server.settings.checkpoint_every
        if server.round == 0:
            return True
        if every.endswith("s"):
            return not self.background.busy and time.monotonic() - self.last_saved >= float(every[:-1])
        return server.round % int(every) == 0

    def evaluate(self, ends: bool = False) -> list[Row]:
        """Score the current state once, and write the scores to the metrics; ``ends``: the run ends here, if earlier than planned."""
        number = self.experiment.server.round
        rounds, averaged = self.experiment.server.rounds, self.experiment.settings.averaged_rounds
        counts = ends or number > rounds - max(1, averaged)
        if number not in self.by_round:
            # The model of the last round counts, unless another one is chosen, which is scored in detail then.
            self.by_round[number] = self.scored(in_detail=counts and self.selection is None)
            self.write([as_line(number, row) for row in self.by_round[number]])
        elif ends and self.scored_before and self.selection is None:
            # The answers for single images are not in the metrics. What scoring again costs is not a cost of the run.
            costs = copy.deepcopy(self.experiment.costs)
            self.scored(in_detail=True)
            self.experiment.costs = costs
        if self.selection is None:  # else callbacks receive the validation scores
            self.rows, self.rows_of_round = self.by_round[number], number
        return self.by_round[number]

    def scored(self, in_detail: bool) -> list[Row]:
        """The scores of the present state; in detail, with an answer for each image where the tests are in this process."""
        bench = self.experiment.bench
        bench.answers = {} if in_detail and self.split == "test" else None
        try:
            rows = self.experiment.evaluate(self.split, in_detail=in_detail)
            self.answers = bench.answers or {}
        finally:
            bench.answers = None
        return rows

    def final_rows(self) -> list[Row]:
        """Score the model the run ends with."""
        number, averaged = self.experiment.server.round, self.experiment.settings.averaged_rounds
        if self.selection is not None:
            self.selection.take()
            self.rows, selected = self.scored(in_detail=True), self.selection.round
        elif averaged:
            self.evaluate(ends=True)
            averaged_over = {n: rows for n, rows in self.by_round.items() if n > number - averaged}
            if len(averaged_over) < min(averaged, number):
                log.warning(
                    "%s: the run stopped early, after round %d. Scores are the mean of %d of its last %d rounds.",
                    self.experiment.settings.selection,
                    number,
                    len(averaged_over),
                    averaged,
                )
            self.rows, selected = mean_rows(averaged_over), number
        else:
            return self.evaluate(ends=True)
        self.write([{**as_line(number, row), "view": f"selected_{row.view}", "selected_round": selected} for row in self.rows])
        return self.rows

    def write(self, lines: list[Mapping[str, Any]]) -> None:
        """Add lines to the metrics."""
        if self.folder is not None:
            if self.saved < 0:
                self.conclude()
            self.folder.append(lines)

    def save_if_between_rounds(self) -> None:
        """After a failure: a round that was cut off must be repeated from its start, so only a state between rounds is worth saving."""
        self.settle()
        if self.folder is None or self.experiment.server.round != self.complete or self.complete == self.saved:
            return
        try:
            self.save(at_once=True)
        except RunFolderError as error:
            log.warning("%s", error)

    def settle(self) -> None:
        """After a failure: wait for the pending checkpoint. That the run failed is worse than that this did too."""
        try:
            self.conclude()
        except RunFolderError as error:
            log.warning("%s", error)

    def conclude(self) -> None:
        """Wait for the pending checkpoint; if it could not be written, that is raised here."""
        if self.pending is None:
            return
        self.background.wait()
        former, self.pending = self.pending, None
        try:
            self.background.finish()
        except BaseException:
            self.experiment.backend.changed |= former.changed
            raise
        self.written(former)

    def written(self, checkpoint: PendingCheckpoint) -> None:
        """Note that a checkpoint can be gone back to."""
        self.saved = checkpoint.round
        self.experiment.backend.retain("checkpoint", checkpoint.marks)

    def save(self, at_once: bool = False, finished: bool = False) -> None:
        """Take a checkpoint, to be written while the next round trains, or at once."""
        assert self.folder is not None
        self.conclude()
        backend = self.experiment.backend
        snapshot = self.experiment.snapshot()
        snapshot.notes |= {**self.folder.seals(), "finished": finished}
        if finished and backend.remote:
            snapshot.notes["client_digests"] = backend.client_digests()
        snapshot.notes["best"] = None if self.selection is None else self.selection.notes()
        draft = self.folder.checkpoints.draft(snapshot, backend.changed, finished)
        # Where clients keep their state themselves, what is here are marks of it, small and never changed.
        taken = PendingCheckpoint(snapshot.round, backend.changed, dict(snapshot.clients) if backend.remote else {})
        if at_once:
            self.folder.checkpoints.put(draft)
            backend.changed = set()
            self.written(taken)
        else:
            draft = draft.apart(state_is_replaced=not changes_server_state(self.experiment.method))
            backend.changed, self.pending = set(), taken
            backend.retain("pending", taken.marks)
            self.copied_bytes = draft.copied_bytes
            self.background.start(functools.partial(self.folder.checkpoints.put, draft))
        self.last_saved = time.monotonic()


def changes_server_state(method: Method) -> bool:
    """Whether code of the method is given the server. Otherwise only the loop makes new state, and it replaces values."""
    return any(SLOTS[name].given_server for name in method.filled_slots)


def is_turn(number: int, rounds: int, every: int, at_end: int = 0) -> bool:
    """Whether a round is scored: every n-th, the last one, and each of the last ``at_end``; none with 0 and 0, where only the end is."""
    return (bool(every and number) and (number % every == 0 or number == rounds)) or number > max(0, rounds - at_end)


def noted_lines(server: Server) -> list[Mapping[str, Any]]:
    """What the method noted of this round, a line for each client."""
    by_client: dict[str, dict[str, Any]] = {}
    for name, values in server.notes.items():
        for client, value in values.items():
            by_client.setdefault(client, {})[name] = value
    return [{"round": server.round, "view": NOTED, "client": client, **values} for client, values in by_client.items()]


def as_line(number: int, row: Row) -> dict[str, Any]:
    """A score as a line of metrics."""
    return {"round": number, "view": row.view, "client": row.client, "domain": row.domain, **row.numbers}


def privacy_lines(number: int, account: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What has been spent of a promise of privacy, by client and in all, as lines of metrics."""
    common = {"round": number, "view": "privacy", "privacy.delta": account["delta"]}
    each = [
        {**common, "client": client, "privacy.epsilon_spent": found["epsilon_spent"]}
        for client, found in account["clients"].items()
    ]
    return [*each, {**common, "client": "all", "privacy.epsilon_spent": account["epsilon_spent"]}]


def rows_at(metrics: Iterable[Mapping[str, Any]], number: int, split: str = "test") -> list[Row]:
    """The scores of one round, from lines of metrics."""
    keys = ("round", "view", "client", "domain", "selected_round")
    views = ("seen", "unseen") if split == "test" else (split,)
    lines = [dict(line) for line in metrics if line["round"] == number]
    selected = [{**line, "view": line["view"].removeprefix("selected_")} for line in lines if line["view"].startswith("selected_")]
    found = selected or [line for line in lines if line["view"] in views]
    return [Row(m["view"], m["client"], m["domain"], {k: v for k, v in m.items() if k not in keys}) for m in found]
