"""Callbacks observe a run during training, and can stop it. They share its state, ``ActiveRun``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.core.evaluation import Row
from polyfed.runs.scores import as_line, scored_rounds

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.folder.final_files import Answers
    from polyfed.runs.folder.run_folder import RunFolder
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


class ActiveRun:
    """A run during training.

    Attributes:
        by_round: Scores of every scored round, on ``split``.
        scores: Scores of the last evaluation, on validation data if it selects the round.
        scored_round: Round of ``scores``; -1 if there are none.
        answers: Prediction for each test image, from the last detailed evaluation.
        callbacks: Called in this order: those of the run, then the user's.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder | None, split: str = "test", resumed: bool = False) -> None:
        self.experiment, self.folder, self.split, self.resumed = experiment, folder, split, resumed
        if folder is not None:
            folder.begin_sealing()
        self.history = [] if folder is None else folder.metrics()
        self.by_round: dict[int, list[Row]] = scored_rounds(self.history, split)
        number, rounds = experiment.server.round, experiment.server.rounds
        # If a run stopped after the evaluation of its last round, it already has these scores.
        self.scores: Sequence[Row] = self.by_round.get(number, []) if number == rounds else []
        self.scored_round = number if self.scores else -1
        self.answers: Answers = {}
        self.callbacks: Sequence[Callback] = ()

    @property
    def path(self) -> str | None:
        return None if self.folder is None else str(self.folder.path)

    def score(self, in_detail: bool) -> list[Row]:
        """Score the current state; ``in_detail`` adds a prediction for each image if the test data is in this process."""
        bench = self.experiment.bench
        bench.answers = {} if in_detail and self.split == "test" else None
        try:
            rows = self.experiment.evaluate(self.split, in_detail=in_detail)
            self.answers = bench.answers or {}
        finally:
            bench.answers = None
        return rows

    def write_scores(self, rows: Sequence[Row]) -> None:
        self.write([as_line(self.experiment.server.round, row) for row in rows])

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is not None:
            self.folder.append(list(lines))

    def begin(self) -> None:
        self._stop_if([callback.begin(self.state()) for callback in self.callbacks])

    def after_round(self) -> None:
        """Call every callback, even if one of them stops the run (StoppedEarly)."""
        replies = [callback.after_round(self.state()) for callback in self.callbacks]
        if self.scored_round == self.experiment.server.round:
            replies += [callback.after_evaluation(self.state()) for callback in self.callbacks]
        self._stop_if(replies)

    def _stop_if(self, replies: Sequence[bool | None]) -> None:
        number, rounds = self.experiment.server.round, self.experiment.server.rounds
        if any(reply is True for reply in replies) and 0 < number < rounds:
            raise StoppedEarly(f"A callback stopped the run after round {number} of {rounds}.")

    def state(self) -> RunState:
        return state_of(self.experiment, self.scores, self.path, self.resumed)
