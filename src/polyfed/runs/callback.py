"""Callbacks: code of the user's own that hears of a run while it is trained, and may stop it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.core.evaluation import Row
from polyfed.core.metrics import IN_DETAIL

if TYPE_CHECKING:
    from polyfed.core.server import Server
    from polyfed.runs.recorder import Recorder
    from polyfed.runs.result import Result


@dataclass(frozen=True)
class RunState:
    """How far a run is, as callbacks are told.

    Attributes:
        method: its text.
        data: the name of the data.
        seed: the seed.
        round: the last round that is over.
        rounds: the rounds that are planned.
        losses: the training loss of each client that trained in this round.
        scores: the scores of the last evaluation (of validation data if they choose the round), each with ``view``, ``client``, ``domain`` and ``numbers``.
        bytes_up: training traffic from clients so far.
        bytes_down: training traffic to clients so far.
        settings: every setting of the run.
        path: the run folder; None where nothing is written.
        score: scores the present state on ``"validation"`` or ``"test"`` data, and returns the rows.
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
    score: Callable[[str], Sequence[Row]] = field(default=lambda split: (), repr=False, compare=False)


class Callback:
    """Hears of one run. Override what you want to hear of; what returns True stops the run after this round.

    Example:
        ``polyfed.run("digits-mini", "fedbn", callbacks=[MyCallback()])``
    """

    def begin(self, run: RunState) -> bool | None:
        """Training begins, or goes on; True stops a run that goes on where it is."""

    def after_round(self, run: RunState) -> bool | None:
        """A round is over; True stops the run."""

    def after_evaluation(self, run: RunState) -> bool | None:
        """The state after this round was scored (``run.scores``); True stops the run."""

    def end(self, result: Result) -> None:
        """The run is over, and its model is scored."""


class StoppedEarly(Exception):
    """A callback has stopped the run; what was trained so far is its end."""


class Callbacks:
    """An observer of the loop that passes on to callbacks what happens."""

    def __init__(self, callbacks: Sequence[Callback], recorder: Recorder) -> None:
        self.callbacks, self.recorder = callbacks, recorder

    def begin(self) -> None:
        """Training begins; raises StoppedEarly where a callback wants a run that goes on to end."""
        state = self.state()
        wishes = [callback.begin(state) for callback in self.callbacks]
        if any(wish is True for wish in wishes) and 0 < state.round < state.rounds:
            raise StoppedEarly(f"A callback has stopped the run after round {state.round} of {state.rounds}.")

    def __call__(self, server: Server) -> None:
        """A round is over; raises StoppedEarly where a callback wants the run to end."""
        if server.round == 0:
            return
        state = self.state()
        scored = self.recorder.rows_of_round == server.round
        wishes = [callback.after_round(state) for callback in self.callbacks]
        wishes += [callback.after_evaluation(state) for callback in self.callbacks] if scored else []
        if any(wish is True for wish in wishes) and server.round < server.rounds:
            raise StoppedEarly(f"A callback has stopped the run after round {server.round} of {server.rounds}.")

    def end(self, result: Result) -> None:
        """The run is over."""
        for callback in self.callbacks:
            callback.end(result)

    def state(self) -> RunState:
        """How far the run is."""
        experiment, folder = self.recorder.experiment, self.recorder.folder
        server = experiment.server
        return RunState(
            method=str(experiment.method),
            data=experiment.settings.data,
            seed=experiment.settings.seed,
            round=server.round,
            rounds=server.rounds,
            losses=dict(experiment.backend.losses_of_round),
            scores=tuple(self.recorder.rows),
            bytes_up=experiment.costs.total("up"),
            bytes_down=experiment.costs.total("down"),
            settings=experiment.settings,
            path=None if folder is None else str(folder.path),
            score=functools.partial(experiment.evaluate, in_detail=experiment.bench.measure in IN_DETAIL),
        )
