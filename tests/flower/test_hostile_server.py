"""A node against a server that means harm: what it sends and what it names cannot take the node's own promises away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, over, tiny_data
from polyfed.core.rounds import Payload
from polyfed.errors import SettingError
from polyfed.flower.node.node import build_node
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.wire.codec import Encoder, payload_of
from polyfed.flower.wire.descriptions import own_versions
from polyfed.flower.wire.message import DESCRIBE, WireMessage
from polyfed.settings import Settings

AT_CLIENTS = 'dp_fedavg(noise="system", noise_at="client", adaptive=False, clip=0.001)'
BIG = {"data": TINY, "domain": "big"}


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def settings_for(method: str, **changes: object) -> Settings:
    return Settings(
        **{"data": TINY, "model": TINY_MODEL, "method": method, "rounds": 2, "batch_size": 4, "local_steps": 3} | changes
    ).trusted()  # type: ignore[arg-type]


def asked(settings: Settings, folder: Path, what: str = "train") -> WireMessage:
    """What an honest server would ask the first client."""
    configs = {number: {"data": TINY, "domain": name} for number, name in enumerate(("big", "middle", "small"), 10)}
    experiment = over(FakeGrid(settings, folder / "grid", configs), settings)
    assert isinstance(experiment.backend, FlowerBackend)
    return experiment.backend.message_for(Encoder(), experiment.server.request(what, ["big"]), "big")


def with_entry(message: WireMessage, ending: str, value: float) -> WireMessage:
    """The same question with one entry full of a value."""
    sent = payload_of(message)
    name = next(name for name in sent.entries if name.endswith(ending))
    entries = {**sent.entries, name: torch.full_like(sent.entries[name], value, dtype=torch.float32)}
    return Encoder().encode(Payload(entries, sent.extras), message.control)


def test_entries_that_are_not_finite_are_refused_before_training(tmp_path: Path) -> None:
    settings = settings_for(AT_CLIENTS)
    node = build_node(settings, BIG, tmp_path / "node")
    message = asked(settings, tmp_path)
    for value in (float("nan"), float("inf"), 1e20):
        found = node.answer(with_entry(message, "running_mean", value)).control
        assert not found["ok"] and "cannot read the request: entry stem.1.running_mean has values" in found["problem"]
        assert not list((tmp_path / "node").glob("privacy*")), "nothing was trained, so nothing is charged"
    assert node.answer(message).control["ok"]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedavg", "no noise that is secret from the server"),
        ("fedwon + dp_sgd", "no noise that is secret from the server"),
        ('dp_fedavg(noise="system")', "no noise that is secret from the server"),
        ('scaffold + dp_fedavg(noise="system", noise_at="client")', "which no noise covers"),
    ],
)
@pytest.mark.parametrize("what", ["train", "evaluate"])
def test_with_a_limit_nothing_is_done_that_the_account_cannot_count(tmp_path: Path, method: str, why: str, what: str) -> None:
    settings = settings_for(method)
    message = asked(settings, tmp_path, what)
    limited = build_node(settings, {**BIG, "max-total-epsilon": 5.0}, tmp_path / "limited").answer(message).control
    assert (limited["ok"], limited["kind"]) == (False, "declined")
    assert "its privacy ledger limits epsilon over all runs (max-total-epsilon)" in limited["problem"] and why in limited["problem"]
    assert build_node(settings, BIG, tmp_path / "free").answer(message).control["ok"]


def test_another_partition_does_not_open_another_account(tmp_path: Path) -> None:
    nodes = [
        build_node(settings_for(AT_CLIENTS, partition=partition), {**BIG, "max-total-epsilon": 5.0}, tmp_path)
        for partition in ("domain", "domain_parts(parts=1, out_of=2)")
    ]
    assert len({node.data.id for node in nodes}) == 2
    assert {node.account.path for node in nodes if node.account is not None} == {tmp_path / "privacy.jsonl"}


@pytest.mark.parametrize("what", ["train", DESCRIBE])
def test_a_partition_that_leaves_a_node_few_examples_is_declined(tmp_path: Path, what: str) -> None:
    settings = settings_for("fedavg", partition="domain_parts(parts=1, out_of=5)", local_steps=None)
    node = build_node(settings, {**BIG, "min-samples": 8}, tmp_path)
    assert len(node.data.train) == 4
    found = node.answer(WireMessage({"what": what, "versions": own_versions()})).control
    assert (found["ok"], found["kind"]) == (False, "declined")
    assert "gives it 4 training examples, but min_samples is 8" in found["problem"]
    whole = build_node(settings_for("fedavg"), {**BIG, "min-samples": 8}, tmp_path)
    assert whole.answer(WireMessage({"what": DESCRIBE, "versions": own_versions()})).control["ok"]
    with pytest.raises(SettingError, match="min-samples must be an integer of at least 1"):
        build_node(settings, {**BIG, "min-samples": 0}, tmp_path)


def test_with_a_limit_no_scores_of_layers_that_trained_without_noise_are_told(tmp_path: Path) -> None:
    settings = settings_for(f"fedbn + {AT_CLIENTS}")
    limited = build_node(settings, {**BIG, "max-total-epsilon": 100.0}, tmp_path / "limited")
    assert limited.answer(asked(settings, tmp_path)).control["ok"]
    found = limited.answer(asked(settings, tmp_path, "evaluate")).control
    assert found["kind"] == "declined" and "layers that stay at clients and get no noise" in found["problem"]


@pytest.mark.parametrize("method", [AT_CLIENTS, 'fedwon + dp_sgd(epsilon=4.0, noise="system")'])
def test_training_that_diverges_is_answered_like_any_other(tmp_path: Path, method: str) -> None:
    settings = settings_for(method, lr=1e30)
    node = build_node(settings, BIG, tmp_path / "node")
    message = with_entry(asked(settings, tmp_path), "head.weight", 1e15)
    found = node.answer(message)
    assert found.control["ok"] and found.control["loss"] is None
    if method == AT_CLIENTS:
        sent, moved = payload_of(message).entries, payload_of(found).entries
        assert all(bool(torch.isfinite(value).all()) for value in moved.values())
        assert float((moved["stem.0.weight"] - sent["stem.0.weight"]).abs().max()) < 1.0, "only noise"
