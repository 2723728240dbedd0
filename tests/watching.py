"""Ways to see what travels, shared by the tests."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.conversation import Ask, Reply
from polyfed.experiment import Experiment
from polyfed.simulate.in_process import InProcess


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
    reply = experiment.delivery.reply

    def watch(ask: Any, info: Any) -> Any:
        made = reply(ask, info)
        seen[ask.round, ask.what] = (set(ask.payloads[info.id].entries), set(made.entries))  # type: ignore[union-attr]
        return made

    experiment.delivery.reply = watch  # type: ignore[method-assign]
    experiment.train()
    return seen
