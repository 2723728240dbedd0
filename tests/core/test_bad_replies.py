"""One client answers badly, to any question a method asks: it is dropped and named, and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.backends.in_process import InProcess
from polyfed.core.client import Client
from polyfed.core.conversation import Ask, Payload, Reply
from polyfed.core.method import Facts, Method
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

BAD = "small"
Bend = Callable[[Payload], Payload]


def not_a_number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, torch.nan) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: not_a_number(one) for name, one in value.items()}
    return float("nan") if isinstance(value, float) else value


def bent_extras(payload: Payload) -> Payload:
    return replace(payload, extras=not_a_number(payload.extras))


def bent_entries(payload: Payload) -> Payload:
    return replace(payload, entries=not_a_number(payload.entries))


def without_extras(payload: Payload) -> Payload:
    return replace(payload, extras={})


def of_another_shape(payload: Payload) -> Payload:
    return replace(payload, extras={n: v[:1] if isinstance(v, Tensor) else v for n, v in payload.extras.items()})


def of_another_layer(payload: Payload) -> Payload:
    return replace(payload, extras={**payload.extras, "layer": "head"})


def trained(monkeypatch: pytest.MonkeyPatch, method: str, question: str, bend: Bend, number: int | None = None) -> Experiment:
    """A run in which one client's answers to one question are bent, in all rounds or in one."""
    ask_clients = InProcess.__call__

    def bending(self: InProcess, ask: Ask) -> Iterator[Reply]:
        for reply in ask_clients(self, ask):
            bad = reply.client == BAD and ask.what == question and number in (None, ask.round)
            yield replace(reply, payload=bend(reply.payload)) if bad else reply

    monkeypatch.setattr(InProcess, "__call__", bending)
    torch.manual_seed(3)
    experiment = Experiment(Settings(method=method, rounds=2, batch_size=4), tiny_federation(), model=TinyNet())
    experiment.train()
    experiment.evaluate()
    return experiment


@pytest.mark.parametrize(
    ("method", "question", "bend", "why"),
    [
        ("fedtan", "fedtan_step", bent_extras, "not finite"),
        ("fedtan", "fedtan_step", without_extras, "'layer' is missing"),
        ("fedtan", "fedtan_step", of_another_shape, "not the statistics that were asked for"),
        ("fedtan", "fedtan_step", of_another_layer, "not the statistics that were asked for"),
        ("static_bn", "static_bn_statistics", bent_entries, "not finite"),
        ("ccst", "ccst_collect", bent_extras, "not finite"),
        ("elcfs", "elcfs_collect", without_extras, "'given' is missing"),
        ("scaffold", "train", bent_extras, "not finite"),
        ("feddg_ga", "train", without_extras, "is missing"),
        ("feddg_ga", "train", bent_entries, "not finite"),
    ],
)
def test_a_bad_reply_is_dropped_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, question: str, bend: Bend, why: str
) -> None:
    with caplog.at_level(logging.WARNING, "polyfed"):
        experiment = trained(monkeypatch, method, question, bend)
    dropped = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert dropped and all(f"client {BAD} is dropped" in message and why in message for message in dropped)
    assert all(bool(torch.isfinite(value).all()) for value in experiment.server.state.values())


def test_who_gave_nothing_usable_still_gets_what_the_others_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = trained(monkeypatch, "ccst", "ccst_collect", bent_extras).backend.client_states
    assert {client: len(kept[client].memory["ccst"]) for client in ("big", "middle", BAD)} == {"big": 1, "middle": 1, BAD: 2}


def test_scores_of_a_rejected_reply_do_not_move_the_weights_of_feddg_ga(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = trained(monkeypatch, "feddg_ga", "train", bent_entries, number=1).server.memory["feddg_ga"]
    assert memory["round"] == {"big": 2, "middle": 2, BAD: 2}, "it counts again in round 2"
    assert memory["weights"][BAD] == pytest.approx(1 / 3), "it has no gap: it did not take part in round 1"


def forget_in_round_two(client: Client) -> None:
    if client.round == 1:
        client.memory["note"] = client.id
    else:
        client.memory.clear()


def test_a_client_can_forget_everything() -> None:
    method = Method("forgets", before_training=(forget_in_round_two,), facts=Facts(client_state=True))
    experiment = Experiment(Settings(rounds=2, batch_size=4), tiny_federation(), method, TinyNet())
    experiment.train()
    assert all(not experiment.backend.state_of(client).memory for client in ("big", "middle", BAD))


@pytest.mark.parametrize(("share", "asked", "needed"), [(0.07, 100, 7), (0.56, 25, 14), (0.5, 3, 2), (0.0, 10, 1), (1.0, 10, 10)])
def test_how_many_must_answer(share: float, asked: int, needed: int) -> None:
    assert Settings(min_share=share).needed(asked) == needed
