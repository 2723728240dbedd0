"""Ways to see what travels, shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from polyfed.conversation import Ask, Reply
from polyfed.experiment import Experiment
from polyfed.simulate.in_process import InProcess, Outcome


def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ask, Reply]]:
    """Every message from now on, as it is answered."""
    seen: list[tuple[Ask, Reply]] = []
    deliver = InProcess.__call__

    def watch(self: InProcess, ask: Ask) -> Any:
        for reply in deliver(self, ask):
            seen.append((ask, reply))
            yield reply

    monkeypatch.setattr(InProcess, "__call__", watch)
    return seen


def watched(experiment: Experiment) -> dict[tuple[int, str], tuple[set[str], set[str]]]:
    """What each round's questions send down and bring up."""
    seen: dict[tuple[int, str], tuple[set[str], set[str]]] = {}
    outcomes = experiment.delivery.outcomes

    def watch(ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        for made in outcomes(ask, clients):
            assert made.payload is not None
            seen[ask.round, ask.what] = (set(ask.payloads[made.client].entries), set(made.payload.entries))
            yield made

    experiment.delivery.outcomes = watch  # type: ignore[method-assign]
    experiment.train()
    return seen
