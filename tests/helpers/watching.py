"""Ways to see what travels, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.backends.in_process import InProcess
from polyfed.backends.workers import Workers
from polyfed.core.rounds import Observer, Reply, Request
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


def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Reply]]:
    """Every message from now on, as it is answered."""
    seen: list[tuple[Request, Reply]] = []
    send_request = StagingBackend.__call__

    def watch(self: StagingBackend, request: Request) -> Any:
        for reply in send_request(self, request):
            seen.append((request, reply))
            yield reply

    for kind in (InProcess, Workers):
        monkeypatch.setattr(kind, "__call__", watch)
    return seen


def watched(experiment: Experiment) -> dict[tuple[int, str], tuple[set[str], set[str]]]:
    """What each round's questions send down and bring up."""
    seen: dict[tuple[int, str], tuple[set[str], set[str]]] = {}
    outcomes = experiment.backend.outcomes

    def watch(request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        for made in outcomes(request, clients):
            assert made.payload is not None
            seen[request.round, request.what] = (set(request.payloads[made.client].entries), set(made.payload.entries))
            yield made

    experiment.backend.outcomes = watch  # type: ignore[method-assign]
    experiment.train()
    return seen


def exchanges(experiment: Experiment, observers: Sequence[Observer] = ()) -> list[tuple[Request, dict[str, Reply]]]:
    """Train, and give every question of it with the replies."""
    seen: list[tuple[Request, dict[str, Reply]]] = []
    reply = experiment.backend.accept

    def watch(request: Request, outcome: Any) -> Any:
        made = reply(request, outcome)
        if not seen or seen[-1][0] is not request:
            seen.append((request, {}))
        seen[-1][1][outcome.client] = made  # type: ignore[assignment]
        return made

    experiment.backend.accept = watch  # type: ignore[method-assign]
    experiment.train(observers)
    return seen
