"""A joined node behind its policy, without Flower's processes: what is answered, what is refused, and what its files say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from flwr.app import Context, RecordDict

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, over, tiny_data
from polyfed.core.rounds import EVALUATION, Payload, Request
from polyfed.flower.app import SETTINGS_KEY, settings_text
from polyfed.flower.deploy.folders import NodeFolder
from polyfed.flower.join import guarded_executor as guarded_app
from polyfed.flower.join.policy import Policy
from polyfed.flower.node.account import account_in
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.wire.codec import Encoder
from polyfed.flower.wire.message import WireMessage
from polyfed.runs.folder.audit_log import lines_of
from polyfed.settings import Settings

SETTINGS = Settings(
    data=TINY, model=TINY_MODEL, method='fedwon + dp_sgd(epsilon=4.0, noise="system")', rounds=2, batch_size=4, local_steps=3
).trusted()
Asking = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeFolder]:
    made = NodeFolder(tmp_path / "node-1")
    made.make()
    monkeypatch.setenv(NodeFolder.variable, str(made.path))
    with tiny_data():
        yield made


@pytest.fixture
def asked(folder: NodeFolder, tmp_path: Path) -> Asking:
    """Request the node, under a policy, for training or for what ``split`` says; the control values of its answer."""
    experiment = over(FakeGrid(SETTINGS, tmp_path / "grid", {10: {"data": TINY, "domain": "big"}}), SETTINGS)
    backend, server = experiment.backend, experiment.server
    assert isinstance(backend, FlowerBackend)

    def message(split: str) -> WireMessage:
        evaluation = Request("evaluate", {"big": Payload(server.outgoing("big"), {"split": split})}, EVALUATION, 1)
        return backend.message_for(Encoder(), evaluation if split else server.request("train", ["big"]), "big")

    def ask(split: str = "", settings: Settings = SETTINGS, **policy: Any) -> dict[str, Any]:
        Policy(data=TINY, domain="big", import_paths=(TINY_MODEL,), **policy).write(folder.policy)
        config = {"data": TINY, "domain": "big", "state": str(folder.state), "resident": False}
        run_config = {SETTINGS_KEY: settings_text(settings), "min-nodes": 3}
        context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run_config)  # type: ignore[arg-type]
        return dict(guarded_app.guarded(message(split), context).control)

    return ask


def test_the_account_lies_next_to_the_audit_log_and_its_limit_is_read_for_every_ask(folder: NodeFolder, asked: Asking) -> None:
    assert asked(dp_required=True)["ok"]
    spent = account_in(folder.privacy_account, 1e-5)["epsilon"]
    assert folder.privacy_account.parent == folder.audit.parent
    refused = asked(dp_required=True, max_total_epsilon=1.01 * spent)
    assert not refused["ok"] and "max_total_epsilon" in refused["problem"]
    (line,) = [line for line in lines_of(folder.audit) if line["event"] == "refused"]
    assert line["why"] == refused["problem"]
    assert asked(max_total_epsilon=1.01 * spent)["ok"], "a limit that a run without noise would pass by is no limit"
    assert account_in(folder.privacy_account, 1e-5)["trainings"] == 2


def test_scores_are_told_only_of_data_that_the_policy_and_the_run_name(folder: NodeFolder, asked: Asking) -> None:
    assert asked("test", dp_required=True)["ok"]
    refused = asked("validation", dp_required=True)
    assert "the server requests validation scores, which no noise covers" in refused["problem"]
    assert "the server requests validation scores, but the run does not select" in asked("validation")["problem"]
    assert "the server requests test scores, but scores does not list them" in asked("test", scores=())["problem"]
    assert [line["event"] for line in lines_of(folder.audit)] == ["refused"] * 3


def test_the_policys_least_samples_holds_for_what_the_partition_leaves(asked: Asking) -> None:
    few = dataclasses.replace(SETTINGS, partition="domain_parts(parts=1, out_of=5)")
    assert "gives it 4 training examples, but min_samples is 8" in asked(settings=few)["problem"]
