"""The doctor over a Grid: to the bit what it says in process from sums, without a question about test data, and under the nodes' rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Message

import polyfed as package
from helpers.flower_fakes import FakeGrid, Meddler
from polyfed.deploy.doctor_app import examine_on_grid
from polyfed.deploy.policy import Policy
from polyfed.deploy.serve import Wanted, prepare
from polyfed.deploy.server_folder import ServerFolder
from polyfed.diagnosis.aggregates import to_be_looked_at
from polyfed.diagnosis.examine import Diagnosis
from polyfed.errors import SettingError
from polyfed.flower.records import wire_message_of
from polyfed.flower.run_config import DEFAULTS, MIN_NODES, TIMEOUT
from polyfed.flower.wire_message import DESCRIBE
from polyfed.methods.checkup import BY_CLASS, STATISTICS
from polyfed.settings import Settings

SETTINGS = Settings(
    data="digits-mini(per_domain=30)", model="small_cnn(width=4)", batch_size=8, method="fedbn", clients_per_round=2
)
DOMAINS = ("pen", "photo", "post", "print", "street")
NODES: dict[int, dict[str, Any]] = {number: {"data": SETTINGS.data, "domain": domain} for number, domain in enumerate(DOMAINS, 10)}


def over(home: Path, meddle: Meddler = lambda asked, answered: answered) -> tuple[Diagnosis, set[str]]:
    """What the doctor says over a Grid, and what nodes were asked."""
    grid = FakeGrid(to_be_looked_at(SETTINGS), home, NODES, meddle)
    found = examine_on_grid(grid, SETTINGS, {**DEFAULTS, MIN_NODES: len(NODES), TIMEOUT: 1.0})  # type: ignore[arg-type]
    return found, {question(message) for message in grid.asked}


def question(message: Message) -> str:
    return str(wire_message_of(message.content).control["what"])


def test_over_a_grid_findings_are_those_in_process_to_the_bit(tmp_path: Path) -> None:
    found, asked = over(tmp_path)
    alike = package.doctor(SETTINGS.data, SETTINGS.model, aggregates_only=True, batch_size=8, clients_per_round=2)
    assert found.as_json()["findings"] == alike.as_json()["findings"]
    assert found.advice == alike.advice and found.cost is not None and found.measures.sampled == 2
    assert asked == {DESCRIBE, "train", STATISTICS, BY_CLASS}, "nobody is asked for scores"


def test_what_nodes_keep_to_themselves_is_left_out(tmp_path: Path) -> None:
    found, _ = over(tmp_path, lambda asked, answered: None if question(asked) == BY_CLASS else answered)
    assert set(found.left_out) == {"gradient bias", "label skew", "domains"}
    assert [one.name for one in found.findings] == ["statistics", "smallest batch", "sampling", "model"]


@pytest.mark.parametrize(
    ("policy", "asked", "why"),
    [
        ({}, STATISTICS, ""),
        ({}, BY_CLASS, ""),
        ({"class_counts": False}, STATISTICS, ""),
        ({"class_counts": False}, BY_CLASS, "numbers of samples by class are asked for, and class_counts is false"),
        ({"data_derived_uploads": "nothing"}, STATISTICS, "(aggregate), data_derived_uploads is nothing"),
        ({"dp_required": True}, STATISTICS, "no noise covers"),
        ({"methods": ("fedavg",)}, "train", "the method checkup is not among the methods that are allowed"),
    ],
)
def test_a_nodes_rules_judge_what_the_doctor_asks(policy: dict[str, Any], asked: str, why: str) -> None:
    problems = Policy(**policy).problems(to_be_looked_at(SETTINGS), {MIN_NODES: 5}, {"what": asked})
    assert why in " ".join(problems) if why else not problems


def test_a_run_without_the_part_is_not_asked_for_sums() -> None:
    (problem,) = Policy().problems(SETTINGS, {MIN_NODES: 5}, {"what": STATISTICS})
    assert "fedbn declares no answer" in problem


def test_after_the_doctor_the_same_folder_serves_a_run_and_then_no_other(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "server")

    def wanted(method: str, doctor: bool = False) -> Wanted:
        return Wanted(Settings(method=method), "demo", "localhost", 2, folder.path, doctor=doctor)

    prepare(folder, wanted("fedavg", doctor=True))
    assert not folder.app.exists() and "settings" not in folder.description()
    prepare(folder, wanted("fedbn"))
    prepare(folder, wanted("fedavg", doctor=True))
    prepare(folder, wanted("fedbn"))
    with pytest.raises(SettingError, match="another settings"):
        prepare(folder, wanted("silobn"))
