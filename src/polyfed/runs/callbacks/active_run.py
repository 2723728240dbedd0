"""State of a run during training that its callbacks share: the scores so far, and the metrics file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.core.evaluation import Row
from polyfed.runs.callbacks.callback import Callback, RunState, StoppedEarly, state_of
from polyfed.runs.scores import as_line, scored_rounds

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.folder.final_files import Answers
    from polyfed.runs.folder.run_folder import RunFolder


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
        """Score the current state; in detail, with a prediction for each image if the test data is in this process."""
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
