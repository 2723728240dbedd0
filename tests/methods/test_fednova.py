"""FedNova: steps and their normalisation by hand, identities, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sgd_by_hand import local_run
from helpers.tiny_runs import PARAMETERS, assert_near, trained
from helpers.watching import messages
from polyfed.methods.fednova import effective_steps, local_steps
from polyfed.settings import Settings

EQUAL = {"a": 8, "b": 8, "c": 8}


def test_effective_steps_count_what_momentum_sets_in_motion() -> None:
    for m in (0.0, 0.5, 0.9):
        counter = total = 0.0
        for steps in range(1, 8):
            counter = m * counter + 1
            total += counter
            assert effective_steps(steps, Settings(momentum=m)) == pytest.approx(total)
    assert effective_steps(5, Settings(optimizer="adam")) == 5


def test_fednova_by_hand() -> None:
    experiment = trained("fednova", rounds=1)
    start = dict(experiment.bench.initial)
    share = {"big": 13 / 26, "middle": 8 / 26, "small": 5 / 26}
    runs = {client: local_run(start, experiment, client, 1, {}) for client in share}
    assert {client: run[2] for client, run in runs.items()} == {"big": 3, "middle": 2, "small": 1}
    effective = sum(share[k] * runs[k][2] for k in share)
    for name in PARAMETERS:
        direction = sum((share[k] * (runs[k][0][name] - start[name]) / runs[k][2] for k in share), torch.zeros(()))
        assert_near(experiment.server.state, {name: start[name] + effective * direction}, 2e-6)
    plain = trained("fedavg", rounds=1).server.state
    assert all(torch.equal(experiment.server.state[name], value) for name, value in plain.items() if name not in PARAMETERS)
    assert experiment.costs.bytes["up"]["training"]["extra"] == 3 * 8


def test_fednova_sends_the_reference_down_and_the_normalised_change_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    start = trained("fedavg", rounds=1).bench.initial
    plain = {reply.client: reply.entries for _, reply in seen}
    seen.clear()
    trained("fednova", rounds=1)
    steps = {"big": 3, "middle": 2, "small": 1}
    assert [reply.client for _, reply in seen] == list(steps)
    for ask, reply in seen:
        down, own = ask.payloads[reply.client], steps[reply.client]
        assert down.extras == {"fednova_reference": 4} and reply.extras == {"fednova_steps": own}
        assert set(down.entries) == set(reply.entries) == set(start)
        assert all(torch.equal(down.entries[name], value) for name, value in start.items())
        for name, value in plain[reply.client].items():
            if name in PARAMETERS:
                torch.testing.assert_close(reply.entries[name], start[name] + (value - start[name]) * 4 / own)
            else:
                assert torch.equal(reply.entries[name], value)


def test_fednova_with_equal_steps_is_fedavg_to_the_bit() -> None:
    assert digest_state("fednova", EQUAL, momentum=0.9) == digest_state("fedavg", EQUAL, momentum=0.9)
    assert digest_state("fednova", local_steps=3) == digest_state("fedavg", local_steps=3)
    assert digest_state("fednova + fedbn", EQUAL) == digest_state("fedbn", EQUAL)


def digest_state(method: str, sizes: dict[str, int] | None = None, **changes: Any) -> list[bytes]:
    state = trained(method, sizes, **changes).server.state
    return [state[name].numpy().tobytes() for name in sorted(state)]


def test_steps_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.core.client import Client

    made: dict[str, int] = {}
    counted: dict[str, int] = {}
    forward = Client.forward

    def count(self: Client, index: int, x: Tensor, y: Tensor) -> Any:
        made[self.id], counted[self.id] = index + 1, local_steps(self)
        return forward(self, index, x, y)

    monkeypatch.setattr(Client, "forward", count)
    for changes in ({"local_epochs": 2}, {"local_epochs": 3, "last_batch": "drop"}, {"local_steps": 5}):
        trained("fedavg", rounds=1, **changes)
        assert made == counted and len(made) == 3
