"""Checkpoints of a run while it trains. A run with a folder survives being killed at any instant.

A checkpoint is taken between two rounds and written in the background while the next one trains. At most one is pending; whatever
ends the run waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyfed.core.method import Method
from polyfed.core.slots import SLOTS
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.background_task import BackgroundTask
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.costs.resource_meter import LEFT_BEHIND
from polyfed.runs.folder.left_files import leave_newcomer, write_answers

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun
    from polyfed.runs.callbacks.selection import BestValidation
    from polyfed.runs.result import Result

log = logging.getLogger("polyfed")


@dataclasses.dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written: of which round, and what the backend must know when that succeeds, or fails."""

    round: int
    changed: set[str]
    marks: Mapping[str, ClientState]


class CheckpointWriter(Callback):
    """Write a checkpoint after the setup, when one is due, and at the end. It runs after what writes metrics, whose size it records."""

    def __init__(self, run: ActiveRun, selection: BestValidation | None = None) -> None:
        self.run, self.experiment, self.folder, self.selection = run, run.experiment, run.folder, selection
        self.last_saved = time.monotonic()
        self.background = BackgroundTask()
        self.pending: PendingCheckpoint | None = None
        self.saved = self.complete = -1
        self.copied_bytes = 0

    def after_round(self, run: RunState) -> None:
        if self.folder is not None and self._is_due(run.round, run.settings.checkpoint_every):
            self.save()
        self.complete = run.round

    def end(self, result: Result) -> None:
        if self.folder is not None:
            leave_newcomer(self.experiment, self.folder.path)
            write_answers(self.folder.path, self.run.answers)
            self.save(at_once=True, finished=True)

    def _is_due(self, number: int, every: str) -> bool:
        """The state before round 1 is always saved. A time limit is no reason to wait for the pending checkpoint."""
        if number and every.endswith("s"):
            return not self.background.busy and time.monotonic() - self.last_saved >= float(every[:-1])
        return number == 0 or number % int(every) == 0

    @property
    def leaves_memory_alone(self) -> bool:
        """True if the pending checkpoint does not hold copies that would count as memory of training."""
        return not self.background.busy or self.copied_bytes < LEFT_BEHIND

    def collect(self) -> None:
        """Conclude the pending checkpoint if it is written. The first is waited for: metrics without a checkpoint show that one was lost."""
        if not self.background.busy or self.saved < 0:
            self.conclude()

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
            self.folder.checkpoints.write_draft(draft)
            backend.changed = set()
            self.written(taken)
        else:
            draft = draft.apart(state_is_replaced=not changes_server_state(self.experiment.method))
            backend.changed, self.pending = set(), taken
            backend.retain("pending", taken.marks)
            self.copied_bytes = draft.copied_bytes
            self.background.start(functools.partial(self.folder.checkpoints.write_draft, draft))
        self.last_saved = time.monotonic()


def changes_server_state(method: Method) -> bool:
    """Whether code of the method is given the server. Otherwise only the loop makes new state, and it replaces values."""
    return any(SLOTS[name].given_server for name in method.filled_slots)
