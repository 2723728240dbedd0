"""Callbacks observe a run during training, and can stop it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.core.evaluation import Row
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.result import Result


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

    Attributes:
        method: Expression of the method.
        data: Name of the data.
        seed: Seed of the run.
        round: The last completed round.
        rounds: Number of planned rounds.
        losses: Training loss of each client that trained in this round.
        scores: Scores of the last evaluation, on validation data if it selects the round. Each has ``view``, ``client``, ``domain`` and
            ``numbers``.
        bytes_up: Training traffic from clients so far.
        bytes_down: Training traffic to clients so far.
        settings: Every setting of the run.
        resumed: True if the run folder existed before.
        path: The run folder, or None.
        score: Function that scores the current state on ``"validation"`` or ``"test"`` data, and returns the rows.
        label: Name of the run within a comparison, a search or a reproduction; empty for a single run.
        number: Position among all runs, from 1.
        total: Number of all runs.
    """

    method: str
    data: str
    seed: int
    round: int
    rounds: int
    losses: Mapping[str, float]
    scores: Sequence[Row]
    bytes_up: int
    bytes_down: int
    settings: Any
    path: str | None
    resumed: bool = False
    score: Callable[[str], Sequence[Row]] = field(default=lambda split: (), repr=False, compare=False)
    label: str = ""
    number: int = 1
    total: int = 1


class Callback:
    """Observe a run. Override the methods you need; return True to stop the run after this round.

    ``polyfed.compare``, ``sweep`` and ``reproduce`` call the same methods for each of their runs.

    Example:
        ``polyfed.run("digits-mini", "fedbn", callbacks=[MyCallback()])``
    """

    def begin(self, run: RunState) -> bool | None:
        """Called before training starts or resumes. True stops a resumed run immediately."""

    def after_round(self, run: RunState) -> bool | None:
        """Called after every round. True stops the run."""

    def after_evaluation(self, run: RunState) -> bool | None:
        """Called after a round whose state was scored (``run.scores``). True stops the run."""

    def message(self, text: str) -> None:
        """Called with a message for the user, for example if a damaged file was skipped. Messages may be repeated."""

    def end(self, result: Result) -> None:
        """Called when the run has finished and the final model has been scored."""


class StoppedEarly(Exception):
    """A callback stopped the run; its last round is the final one."""


def state_of(experiment: Experiment, scores: Sequence[Row] = (), path: str | None = None, resumed: bool = False) -> RunState:
    return RunState(
        method=str(experiment.method),
        data=experiment.settings.data,
        seed=experiment.settings.seed,
        round=experiment.server.round,
        rounds=experiment.server.rounds,
        losses=dict(experiment.backend.losses_of_round),
        scores=tuple(scores),
        bytes_up=experiment.costs.total("up"),
        bytes_down=experiment.costs.total("down"),
        settings=experiment.settings,
        path=path,
        resumed=resumed,
        score=experiment.score,
    )


class Callbacks(Callback):
    """Call several callbacks; within a comparison, with the label and the position of the run.

    Args:
        callbacks: Called in this order.
        label: Name of the run, added before the existing label.
        before: Number of runs before this one.
        total: Number of all runs.
    """

    def __init__(self, callbacks: Sequence[Callback], label: str = "", before: int = 0, total: int = 1) -> None:
        self.callbacks, self.label, self.before, self.total = callbacks, label, before, total
        self.began = self.trained = False

    def begin(self, run: RunState) -> bool:
        self.began = True
        return self._any([callback.begin(self._labelled(run)) for callback in self.callbacks])

    def after_round(self, run: RunState) -> bool:
        self.trained = True
        return self._any([callback.after_round(self._labelled(run)) for callback in self.callbacks])

    def after_evaluation(self, run: RunState) -> bool:
        return self._any([callback.after_evaluation(self._labelled(run)) for callback in self.callbacks])

    def message(self, text: str) -> None:
        for callback in self.callbacks:
            callback.message(text)

    def end(self, result: Result) -> None:
        for callback in self.callbacks:
            callback.end(result)

    def end_reused(self, result: Result) -> None:
        """Call the callbacks for a reused run, which has finished before and calls none; do nothing for other runs."""
        if not self.began:
            self.begin(state_of(result.experiment, result.rows, result.path, resumed=True))
            self.end(result)

    def _labelled(self, run: RunState) -> RunState:
        if not self.label:
            return run
        label = ": ".join(filter(None, (self.label, run.label)))
        return dataclasses.replace(run, label=label, number=self.before + run.number, total=self.total)

    @staticmethod
    def _any(replies: Sequence[bool | None]) -> bool:
        return any(reply is True for reply in replies)
