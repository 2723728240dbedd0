"""Ways to see what travels, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from polyfed.backends.base import Outcome
from polyfed.backends.in_process import InProcess
from polyfed.core.rounds import Ask, Observer, Reply
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment


class AfterRound(Callback):
    """Calls a function after every round."""

    def __init__(self, act: Callable[[RunState], Any]) -> None:
        self.act = act

    def after_round(self, run: RunState) -> None:
        self.act(run)


class Messages(Callback):
    """Keeps messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ask, Reply]]:
    """Every message from now on, as it is answered."""
    seen: list[tuple[Ask, Reply]] = []
    ask_clients = InProcess.__call__

    def watch(self: InProcess, ask: Ask) -> Any:
        for reply in ask_clients(self, ask):
            seen.append((ask, reply))
            yield reply

    monkeypatch.setattr(InProcess, "__call__", watch)
    return seen


def watched(experiment: Experiment) -> dict[tuple[int, str], tuple[set[str], set[str]]]:
    """What each round's questions send down and bring up."""
    seen: dict[tuple[int, str], tuple[set[str], set[str]]] = {}
    outcomes = experiment.backend.outcomes

    def watch(ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        for made in outcomes(ask, clients):
            assert made.payload is not None
            seen[ask.round, ask.what] = (set(ask.payloads[made.client].entries), set(made.payload.entries))
            yield made

    experiment.backend.outcomes = watch  # type: ignore[method-assign]
    experiment.train()
    return seen


def exchanges(experiment: Experiment, observers: Sequence[Observer] = ()) -> list[tuple[Ask, dict[str, Reply]]]:
    """Train, and give every question of it with the replies."""
    seen: list[tuple[Ask, dict[str, Reply]]] = []
    reply = experiment.backend.taken

    def watch(ask: Ask, outcome: Any) -> Any:
        made = reply(ask, outcome)
        if not seen or seen[-1][0] is not ask:
            seen.append((ask, {}))
        seen[-1][1][outcome.client] = made  # type: ignore[assignment]
        return made

    experiment.backend.taken = watch  # type: ignore[method-assign]
    experiment.train(observers)
    return seen
