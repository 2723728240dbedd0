"""Two nodes with one name: neither a smaller number nor another word takes an honest node's place."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Message

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, tiny_data
from polyfed.errors import DataError, RunFolderError
from polyfed.flower.deploy.folders import ServerFolder
from polyfed.flower.serve.audited_app import EnrolledNames
from polyfed.flower.serve.registry import ENROLLED, NodeRecord, NodeRegistry
from polyfed.flower.server.roster import FILE, ClientNames, Roster
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire.message import WireMessage
from polyfed.flower.wire.records import records_of, wire_message_of
from polyfed.flower.wire.transport import Transport
from polyfed.settings import Settings

SMALL = Settings(data=TINY, model=TINY_MODEL, rounds=1, batch_size=4, local_steps=2, checkpoint_every="1").trusted()
LIAR, BIG, MIDDLE, LITTLE = 1, 2, 3, 4
CONFIGS = {
    LIAR: {"data": TINY, "domain": "small", "client": "liar"},
    BIG: {"data": TINY, "domain": "big"},
    MIDDLE: {"data": TINY, "domain": "middle"},
    LITTLE: {"data": TINY, "domain": "small"},
}
HONEST = {number: config for number, config in CONFIGS.items() if number != LIAR}


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def says_big(asked: Message, answered: Message) -> Message:
    """The liar calls itself big; its number is the smallest."""
    if asked.metadata.dst_node_id == LIAR and asked.metadata.message_type.startswith("query"):
        control = copy.deepcopy(dict(wire_message_of(answered.content).control))
        control["description"]["client"] = "big"
        answered.content = records_of([WireMessage(control)])[0]
    return answered


def config_for(folder: Path, **values: Any) -> dict[str, Any]:
    return {"out": str(folder / "run"), "min-nodes": 2, "wait": 0.0, "timeout": 0.5, "patience": 0.0} | values


def lying_grid(folder: Path, settings: Settings = SMALL) -> FakeGrid:
    return FakeGrid(settings, folder / "nodes", CONFIGS, says_big)


def roster_over(grid: FakeGrid, names: ClientNames | None = None) -> Roster:
    return Roster(Transport(grid), timeout=5.0, patience=0.0, names=names or ClientNames())  # type: ignore[arg-type]


def server_with(folder: Path, clients: dict[int, str]) -> EnrolledNames:
    """A server that enrolled node-1, node-2 and so on under these clients' names."""
    server = ServerFolder(folder)
    server.make()
    with NodeRegistry.changed(folder) as registry:
        for number, client in clients.items():
            registry.nodes[f"node-{number}"] = NodeRecord(f"node-{number}", ENROLLED, client=client)
    ServerFolder(folder).node_numbers.write_text(json.dumps({str(number): f"node-{number}" for number in clients}))
    return EnrolledNames(server)


def test_of_two_that_say_the_same_at_the_start_none_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run_on_grid(lying_grid(tmp_path), SMALL, config_for(tmp_path))  # type: ignore[arg-type]
    assert found.experiment.server.client_ids == ["middle", "small"]
    for node in (LIAR, BIG):
        sentence = f"Node {node} cannot take part: Nodes {LIAR} and {BIG} all report the client name big"
        assert any(text.startswith(sentence) for text in caplog.messages)


def test_who_had_a_name_keeps_it_when_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = run_on_grid(FakeGrid(SMALL, tmp_path / "nodes", HONEST), SMALL, config_for(tmp_path))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "run" / FILE).read_text()) == {"big": "2", "middle": "3", "small": "4"}
    with caplog.at_level(logging.WARNING, "polyfed"):
        again = run_on_grid(lying_grid(tmp_path), SMALL, config_for(tmp_path))  # type: ignore[arg-type]
    assert again.experiment.server.client_ids == first.experiment.server.client_ids and again.digest == first.digest
    (said,) = [text for text in caplog.messages if "cannot take part" in text]
    assert said.startswith(f"Node {LIAR} cannot take part: It reports the client name big, which belongs to node {BIG}.")


def test_a_run_that_goes_on_after_all_numbers_changed_is_taken_up_by_those_who_are_there(tmp_path: Path) -> None:
    first = run_on_grid(FakeGrid(SMALL, tmp_path / "nodes", HONEST), SMALL, config_for(tmp_path))  # type: ignore[arg-type]
    moved = {number + 100: config for number, config in HONEST.items()}
    again = run_on_grid(FakeGrid(SMALL, tmp_path / "nodes", moved), SMALL, config_for(tmp_path))  # type: ignore[arg-type]
    assert again.digest == first.digest


def test_a_node_with_another_ones_whole_description_displaces_nobody_who_is_there(tmp_path: Path) -> None:
    twin = {**HONEST, 99: CONFIGS[BIG]}
    grid = FakeGrid(SMALL, tmp_path, HONEST)
    roster = roster_over(grid)
    roster.gather(3, 0.0)
    grid.configs = twin
    assert roster.present(["big"], insist=False) == {"big": BIG}
    grid.offline.add(BIG)
    roster.refused.clear()
    assert roster.present(["big"], insist=False) == {"big": 99}, "while it is gone, a node may have come back under another number"
    grid.offline.clear()
    assert roster.present(["big"], insist=False) == {"big": BIG}, "who had the name first has it again"
    assert roster.present(["big"], insist=False) == {"big": BIG}


def test_of_two_that_want_an_absent_ones_place_none_gets_it(tmp_path: Path) -> None:
    grid = FakeGrid(SMALL, tmp_path, HONEST)
    roster = roster_over(grid)
    roster.gather(3, 0.0)
    grid.configs = {**HONEST, 98: CONFIGS[BIG], 99: CONFIGS[BIG]}
    grid.offline.add(BIG)
    assert roster.present(["big", "middle"], insist=False) == {"middle": MIDDLE}


def test_a_damaged_list_of_names_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(RunFolderError, match=f"Cannot read .*{FILE}"):
        ClientNames(tmp_path)


def test_the_node_that_enrolled_with_a_name_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = server_with(tmp_path / "server", {LIAR: "liar", BIG: "big", MIDDLE: "middle", LITTLE: "small"})
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = run_on_grid(lying_grid(tmp_path), SMALL, config_for(tmp_path), names)  # type: ignore[arg-type]
    assert found.experiment.server.client_ids == ["big", "middle", "small"]
    (said,) = [text for text in caplog.messages if "cannot take part" in text]
    assert said.startswith("Node node-1 cannot take part: It reports the client name big, which belongs to node node-2.")


def test_the_name_of_an_enrolled_node_is_nobodys_while_it_is_not_there(tmp_path: Path) -> None:
    names = server_with(tmp_path / "server", {LIAR: "liar", BIG: "big", MIDDLE: "middle", LITTLE: "small"})
    grid = lying_grid(tmp_path)
    grid.offline.add(BIG)
    assert [node.client for node in roster_over(grid, names).gather(2, 0.0)] == ["middle", "small"]


def test_a_run_does_not_go_on_with_a_liar_in_an_enrolled_nodes_place(tmp_path: Path) -> None:
    names = server_with(tmp_path / "server", {LIAR: "liar", BIG: "big", MIDDLE: "middle", LITTLE: "small"})
    settings = dataclasses.replace(SMALL, method="fedbn")
    run_on_grid(FakeGrid(settings, tmp_path / "nodes", HONEST), settings, config_for(tmp_path), names)  # type: ignore[arg-type]
    grid = lying_grid(tmp_path, settings)
    grid.offline.add(BIG)
    with pytest.raises(
        DataError, match=r"did not connect within 0 seconds: big\. It reports the client name big, which belongs to node node-2"
    ):
        run_on_grid(grid, settings, config_for(tmp_path), names)  # type: ignore[arg-type]


def test_an_enrolled_node_comes_back_under_another_number_and_no_other_takes_its_place(tmp_path: Path) -> None:
    names = server_with(tmp_path / "server", {LIAR: "liar", BIG: "big", MIDDLE: "middle", LITTLE: "small"})
    grid = FakeGrid(SMALL, tmp_path, HONEST)
    roster = roster_over(grid, names)
    roster.gather(3, 0.0)
    numbers = ServerFolder(tmp_path / "server").node_numbers
    numbers.write_text(json.dumps({**json.loads(numbers.read_text()), "98": "node-1", "99": "node-2"}))
    grid.offline.add(BIG)
    grid.configs = {**HONEST, 98: CONFIGS[BIG]}
    assert roster.present(["big"], insist=False) == {}
    grid.configs = {**grid.configs, 99: CONFIGS[BIG]}
    assert roster.present(["big"], insist=False) == {"big": 99}
