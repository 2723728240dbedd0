"""The server distrusts nodes: an odd one is left out by name, and the run of the others goes on."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, tiny_data
from helpers.odd_descriptions import ODD_NODES, Change
from polyfed.errors import DataError, SettingError
from polyfed.flower.node.node import build_node
from polyfed.flower.server.federation import federation_of
from polyfed.flower.server.roster import Roster
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire import descriptions
from polyfed.flower.wire.descriptions import Description, own_versions, plain_text
from polyfed.flower.wire.message import DESCRIBE, BadMessage, WireMessage
from polyfed.flower.wire.records import records_of, wire_message_of
from polyfed.flower.wire.transport import Transport
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import train_run
from polyfed.runs.result import Result
from polyfed.settings import Settings

SMALL = Settings(data=TINY, model=TINY_MODEL, rounds=1, batch_size=4, local_steps=2, checkpoint_every="1").trusted()
ODD = 3
CONFIGS = {1: {"data": TINY, "domain": "big"}, 2: {"data": TINY, "domain": "middle"}, ODD: {"data": TINY, "domain": "small"}}


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def describing(change: Change) -> Callable[[Message, Message], Message]:
    """The odd node's description is changed on its way."""

    def meddle(asked: Message, answered: Message) -> Message:
        if asked.metadata.dst_node_id == ODD and asked.metadata.message_type.startswith("query"):
            control = copy.deepcopy(dict(wire_message_of(answered.content).control))
            control["description"] = change(control["description"])
            answered.content = records_of([WireMessage(control)])[0]
        return answered

    return meddle


def run(tmp_path: Path, meddle: Callable[[Message, Message], Message], settings: Settings = SMALL, **config: Any) -> Result:
    grid = FakeGrid(SMALL, tmp_path / "nodes", CONFIGS, meddle)
    asked = {"out": str(tmp_path / "run"), "min-nodes": 2, "wait": 1.0, "timeout": 0.5, "patience": 0.0} | config
    return run_on_grid(grid, settings, asked)  # type: ignore[arg-type]


def honest(asked: Message, answered: Message) -> Message:
    return answered


@pytest.mark.parametrize("odd", ODD_NODES)
def test_an_odd_node_is_left_out_by_name_and_the_run_goes_on(odd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, why = ODD_NODES[odd]
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run(tmp_path, describing(change))
    assert found.experiment.server.client_ids == ["big", "middle"]
    (said,) = [text for text in caplog.messages if text.startswith(f"Node {ODD} cannot take part")]
    assert why in said


def test_too_few_that_fit_end_the_run_with_the_reasons(tmp_path: Path) -> None:
    change, why = ODD_NODES["zero samples"]
    with pytest.raises(DataError, match=f"2 of 3 nodes can take part. .*{why}"):
        run(tmp_path, describing(change), **{"min-nodes": 3})


def missing_heartbeats(times: int) -> Callable[[Message, Message], Message]:
    """The SuperLink says of the odd node that it is not there, as often as this."""
    left = itertools.count(times, -1)

    def meddle(asked: Message, answered: Message) -> Message:
        if asked.metadata.dst_node_id == ODD and asked.metadata.message_type.startswith("query") and next(left) > 0:
            return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="no heartbeat"), reply_to=asked)
        return answered

    return meddle


def test_a_node_that_misses_a_heartbeat_is_asked_again_while_it_is_needed(tmp_path: Path) -> None:
    found = run(tmp_path, missing_heartbeats(2), **{"min-nodes": 3, "wait": 30.0})
    assert sorted(found.experiment.server.client_ids) == ["big", "middle", "small"]


def test_a_node_that_stays_away_is_named_and_nobody_waits_longer_than_said(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"2 of 3 nodes can take part\. it was not connected when the request was sent: no heartbeat"
    ):
        run(tmp_path, missing_heartbeats(1000), **{"min-nodes": 3})


def test_where_enough_are_there_a_node_that_is_away_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run(tmp_path, missing_heartbeats(1000))
    assert found.experiment.server.client_ids == ["big", "middle"]
    assert any(text.startswith(f"Node {ODD} cannot take part: it was not connected") for text in caplog.messages)


def test_where_nodes_differ_without_a_majority_nobody_is_called_odd(tmp_path: Path) -> None:
    change, _ = ODD_NODES["another class list"]
    grid = FakeGrid(SMALL, tmp_path, {number: CONFIGS[number] for number in (2, ODD)}, describing(change))
    with pytest.raises(DataError, match="All nodes need the same classes in the same order"):
        run_on_grid(grid, SMALL, {"min-nodes": 2, "wait": 1.0})  # type: ignore[arg-type]


def test_a_node_cannot_name_code_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: pytest.fail("the server ran what a node named"))
    nameless = dataclasses.replace(SMALL, model=None)
    with pytest.raises(SettingError, match="nodes may not choose for the server"):
        run(tmp_path, describing(lambda told: told | {"default_model": "os:getcwd"}), nameless)


def test_names_lose_their_control_characters(tmp_path: Path) -> None:
    found = run(tmp_path, describing(lambda told: told | {"source": "ward\x1b[2J\n7", "name": "tiny\u202e"}))
    assert "ward[2J7" in found.experiment.federation.source
    assert plain_text("a\x00b\x7fc\u200bd\r\n") == "abcd"


def test_another_torch_is_reported_and_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def older(told: dict[str, Any]) -> dict[str, Any]:
        return told | {"versions": told["versions"] | {"torch": "1.0"}}

    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run(tmp_path, describing(older))
    assert found.experiment.server.client_ids == ["big", "middle", "small"]
    assert any("small (1.0) differ" in text for text in caplog.messages)


def test_a_node_refuses_a_server_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = build_node(SMALL, CONFIGS[1], tmp_path)
    asked = WireMessage({"what": DESCRIBE, "versions": own_versions() | {"polyfed": "9.9"}})
    answered = node.answer(asked)
    assert not answered.control["ok"] and "its versions differ: polyfed 9.9" in answered.control["problem"]
    assert node.answer(WireMessage({"what": DESCRIBE, "versions": own_versions()})).control["ok"]
    assert not node.answer(WireMessage({"what": DESCRIBE})).control["ok"]


def test_a_node_that_says_its_loss_is_not_finite_does_not_end_the_others_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meddle(asked: Message, answered: Message) -> Message:
        if asked.metadata.dst_node_id == ODD and asked.metadata.message_type.startswith("train"):
            refused = {"ok": False, "kind": "not_finite", "problem": "the loss became \x1b[31mnan"}
            answered.content = records_of([WireMessage(refused)])[0]
        return answered

    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run(tmp_path, meddle)
    assert found.experiment.server.round == 1
    assert "Round 1: client small is dropped: the loss became [31mnan" in caplog.messages


def test_an_answer_that_flower_cannot_put_together_leaves_only_its_node_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = FakeGrid.pull_messages

    def pulled(grid: FakeGrid, message_ids: list[str]) -> list[Message]:
        found = pull(grid, message_ids)
        if any(message.metadata.src_node_id == ODD and message.metadata.message_type.startswith("train") for message in found):
            raise IndexError("list index out of range")
        return found

    monkeypatch.setattr(FakeGrid, "pull_messages", pulled)
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run(tmp_path, honest)
    assert found.experiment.server.round == 1
    assert "Round 1: client small is dropped: its reply is malformed (IndexError)." in caplog.messages


def test_where_the_run_names_no_model_a_node_that_names_code_or_another_model_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nameless = dataclasses.replace(SMALL, model=None)

    def meddle(asked: Message, answered: Message) -> Message:
        told = copy.deepcopy(dict(wire_message_of(answered.content).control))
        if "description" in told:
            told["description"]["default_model"] = "os:getcwd" if asked.metadata.dst_node_id == ODD else "small_cnn"
            answered.content = records_of([WireMessage(told)])[0]
        return answered

    grid = FakeGrid(nameless, tmp_path / "nodes", CONFIGS, meddle)
    with caplog.at_level(logging.WARNING, "polyfed"):
        nodes = Roster(Transport(grid), own_model=True).gather(2, 1.0)  # type: ignore[arg-type]
    assert [node.client for node in nodes] == ["big", "middle"]
    assert any("that of small is custom code, which nodes may not choose" in text for text in caplog.messages)


def test_a_description_is_exactly_what_the_node_wrote(tmp_path: Path) -> None:
    told = build_node(SMALL, CONFIGS[1], tmp_path).description()
    found = Description.read(told)
    assert (found.client, found.domains, found.samples) == ("big", ("big",), 21)
    assert found.default_model == "", "this one names code"
    with pytest.raises(BadMessage, match="has no classes"):
        Description.read({key: value for key, value in told.items() if key != "classes"})
    assert descriptions.version_problem(own_versions()) == ""


def test_a_description_does_not_name_images_that_were_skipped(tmp_path: Path) -> None:
    for label in ("benign", "malign"):
        folder = tmp_path / "ward" / label
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(folder / f"{number}.png")
    (tmp_path / "ward/benign/patient 7.png").write_bytes(b"damaged")
    data = f"image_folder(root='{tmp_path}', size=8, skip_unreadable=True)"
    told = build_node(Settings(), {"data": data, "domain": "ward"}, tmp_path / "state").description()
    assert "1 unreadable image skipped" in told["source"]
    assert "patient" not in str(told) and ".png" not in str(told)


def test_ranges_of_images_come_from_the_nodes(tmp_path: Path) -> None:
    """A server knows how each node scales images with more than 8 bits, also if two nodes scale one domain differently."""
    found = []
    for client, domain, level in (("a", "ward", 3000), ("b", "ward", 50_000), ("c", "lab", 900)):
        for number, label in itertools.product(range(8), ("benign", "malign")):
            file = tmp_path / client / domain / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), level + number, np.uint16)).save(file)
        config = {"data": f"image_folder(root='{tmp_path / client}', size=8)", "client": client}
        found.append(Description.read(build_node(Settings(), config, tmp_path / "state").description()))
    assert federation_of(found).preparation.deep_ranges == {
        "ward": {"integers": (0, 4095)},
        "b": {"integers": (0, 65535)},
        "lab": {"integers": (0, 1023)},
    }


def test_a_node_that_claims_many_samples_outvotes_nobody_with_a_capped_share(tmp_path: Path) -> None:
    def boast(told: dict[str, Any]) -> dict[str, Any]:
        counts = [1_000_000, *told["class_counts"][1:]]
        return told | {"class_counts": counts, "samples": sum(counts)}

    free = run(tmp_path / "free", describing(boast))
    weights = free.experiment.server.default_weights(["small", "big", "middle"])
    assert weights["small"] / sum(weights.values()) > 0.99
    bound = run(tmp_path / "bound", describing(boast), dataclasses.replace(SMALL, max_weight_share=0.5))
    weights = bound.experiment.server.default_weights(["small", "big", "middle"])
    assert weights == {"small": 35.0, "big": 21.0, "middle": 14.0}
    assert bound.digest != free.digest


def test_the_bounds_give_the_same_weights_over_the_grid_as_in_process(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, max_weight_share=0.4, max_update_norm=0.01)
    grid = FakeGrid(settings, tmp_path / "nodes", CONFIGS)
    found = run_on_grid(grid, settings, {"out": str(tmp_path / "run"), "min-nodes": 3, "wait": 1.0})  # type: ignore[arg-type]
    expected = train_run(Experiment(settings), None)
    assert found.digest == expected.digest
    assert expected.digest != train_run(Experiment(SMALL), None).digest
    assert all(torch.isfinite(value).all() for value in expected.experiment.server.state.values())
