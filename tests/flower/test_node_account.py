"""A node's own privacy account: over runs, against a server that repeats, forgets or lies, and through kill -9."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from opacus.accountants import RDPAccountant

from helpers.command_line import Command
from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, over, tiny_data
from polyfed.core.method import as_method
from polyfed.core.privacy import Charge
from polyfed.core.privacy import account_of as server_account
from polyfed.errors import ClientFailure, Declined, SettingError
from polyfed.flower.node.account import NodeAccount, account_in, account_of, counts, spent_by
from polyfed.flower.node.node import build_node
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.wire.codec import Encoder
from polyfed.flower.wire.message import WireMessage
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.audit_log import lines_of, verify
from polyfed.runs.lifecycle import train_run
from polyfed.runs.result import Result
from polyfed.settings import Settings

PRIVATE = 'fedwon + dp_sgd(epsilon=4.0, noise="system")'
DOMAINS = ("big", "middle", "small")
STEP = Charge("samples", 2.0, 0.1, 10)


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def private(method: str = PRIVATE, rounds: int = 2) -> Settings:
    return Settings(data=TINY, model=TINY_MODEL, method=method, rounds=rounds, batch_size=4, local_steps=3).trusted()


def grid_at(folder: Path, settings: Settings, limits: Mapping[str, Any] | None = None) -> FakeGrid:
    """Nodes with data of their own; those of the same folder keep the same accounts."""
    configs = {number: {"data": TINY, "domain": name, **(limits or {})} for number, name in enumerate(DOMAINS, 10)}
    return FakeGrid(settings, folder, configs)


def account_at(folder: Path, domain: str = "big") -> NodeAccount:
    return account_of({}, folder / str(10 + DOMAINS.index(domain)))


def spent_at(folder: Path, domain: str = "big") -> float:
    return float(account_in(account_at(folder, domain).path, 1e-5)["epsilon"])


def told(result: Result) -> Mapping[str, Any]:
    """What the server knows of each client's account in a run."""
    found = server_account(result.experiment.server)
    assert found is not None
    return found["clients"]  # type: ignore[no-any-return]


def test_charges_add_up_as_opacus_adds_them(tmp_path: Path) -> None:
    account = NodeAccount(tmp_path / "privacy.jsonl")
    wanted = RDPAccountant()
    for number, charge in enumerate((STEP, STEP, Charge("samples", 1.5, 0.05, 7)), 1):
        account.spend(charge, "pen", "run", number)
        wanted.history.append((charge.noise_multiplier, charge.sample_rate, charge.steps))
    found = account_in(account.path, 1e-5)
    assert found["epsilon"] == pytest.approx(wanted.get_epsilon(1e-5), abs=1e-9)
    assert list(lines_of(account.path))[-1]["epsilon_in_all"] == found["epsilon"]
    assert (found["trainings"], found["protects"]) == (3, "samples")
    assert account.path.stat().st_mode & 0o777 == 0o600


def test_a_client_that_is_also_protected_by_sample_counts_with_half_its_noise() -> None:
    whole = Charge("clients", 6.0, 1.0, 1)
    assert spent_by([whole], 1e-5) == spent_by([Charge("samples", 6.0, 1.0, 1)], 1e-5)
    assert spent_by([whole, STEP], 1e-5) == spent_by([Charge("samples", 3.0, 1.0, 1), STEP], 1e-5)


def test_a_charge_beyond_the_limit_is_declined_and_not_written(tmp_path: Path) -> None:
    account = NodeAccount(tmp_path / "privacy.jsonl", max_epsilon=1.2 * spent_by([STEP], 1e-5))
    account.spend(STEP, "pen", "one", 1)
    with pytest.raises(Declined, match=r"over all runs it has spent epsilon = .* \(max_total_epsilon\)") as refused:
        account.spend(Charge("samples", 1.0, 0.1, 10), "pen", "two", 1)
    assert "delta = 1e-05" in str(refused.value)
    assert verify(account.path).lines == 1
    account.spend(Charge("samples", 50.0, 0.01, 1), "pen", "two", 1)


def _spend_and_die(path: Path) -> None:
    NodeAccount(path).spend(STEP, "pen", "run", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_right_after_it_spent_has_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=_spend_and_die, args=(path,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert account_in(path, 1e-5)["epsilon"] == spent_by([STEP, STEP], 1e-5)


def test_a_line_cut_off_by_a_power_cut_is_removed_and_the_rest_counts(tmp_path: Path) -> None:
    account = NodeAccount(tmp_path / "privacy.jsonl")
    account.spend(STEP, "pen", "run", 1)
    with account.path.open("a") as file:
        file.write('{"event": "spent", "noise_mul')
    account.spend(STEP, "pen", "run", 2)
    assert list(lines_of(account.path))[-1]["torn_bytes_removed"] > 0
    assert account_in(account.path, 1e-5)["trainings"] == 2


def test_a_changed_account_and_one_that_cannot_be_written_spend_nothing(tmp_path: Path) -> None:
    account = NodeAccount(tmp_path / "privacy.jsonl")
    for number in (1, 2):
        account.spend(STEP, "pen", "run", number)
    account.path.write_text(account.path.read_text().replace('"steps": 10', '"steps": 1', 1))
    with pytest.raises(ClientFailure, match=r"its privacy ledger was changed or damaged.*line 1 was changed"):
        account.spend(STEP, "pen", "run", 3)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ClientFailure, match="cannot write its privacy ledger"):
        NodeAccount(tmp_path / "folder").spend(STEP, "pen", "run", 1)


def test_a_limit_that_is_no_limit_is_refused(tmp_path: Path) -> None:
    for value in (-1.0, float("nan"), True, "8"):
        with pytest.raises(SettingError, match="max-total-epsilon must be a positive number"):
            account_of({"max-total-epsilon": value}, tmp_path)


def test_only_noise_that_the_server_cannot_take_off_is_counted() -> None:
    for method, counted in (
        (PRIVATE, True),
        ("fedwon + dp_sgd", False),
        ("fedavg", False),
        ('dp_fedavg(noise="system")', False),
        ('dp_fedavg(noise="system", noise_at="client")', True),
    ):
        assert counts(as_method(method).facts) is counted


def test_runs_add_up_and_beyond_its_limit_a_node_refuses_by_name_at_both_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = private()
    first = told(train_run(over(grid_at(tmp_path, settings), settings), None))
    assert {name: spent_at(tmp_path, name) for name in DOMAINS} == pytest.approx(
        {name: account["epsilon_spent"] for name, account in first.items()}, abs=1e-9
    ), "the account of the node agrees with that of an honest server"

    again = grid_at(tmp_path, settings)
    limit = 1.01 * spent_at(tmp_path, "big")
    again.configs[10]["max-total-epsilon"] = limit  # type: ignore[index]
    second = told(train_run(over(again, settings), None))
    said = [record for record in caplog.records if "over all runs it has spent" in record.getMessage()]
    assert {"Client big" in record.getMessage() for record in said} == {True}
    assert {record.module for record in said} == {"node", "base"}, "the node and the server must say it"
    assert set(second) == {"middle", "small"} and spent_at(tmp_path, "big") < limit
    others = account_in(account_at(tmp_path, "small").path, 1e-5)
    assert others["epsilon"] > 1.2 * first["small"]["epsilon_spent"]
    assert [run["trainings"] for run in others["runs"].values()] == [2, 2]


def test_a_server_that_repeats_a_round_from_an_empty_state_is_counted_each_time(tmp_path: Path) -> None:
    settings = private()
    grid = grid_at(tmp_path, settings)
    message = training_ask(over(grid, settings), "big")
    node = build_node(settings, {**grid.configs[10], "max-total-epsilon": 6.0}, tmp_path / "10")
    answers = [node.answer(message) for _ in range(12)]
    taken = [answer for answer in answers if answer.control["ok"]]
    assert 1 < len(taken) < 12
    assert {answer.control["kind"] for answer in answers if not answer.control["ok"]} == {"declined"}
    assert len(list(lines_of(account_at(tmp_path).path))) == len(taken)
    assert 3.0 < spent_at(tmp_path) <= 6.0


def test_a_method_that_promises_and_does_not_say_what_it_spends_gets_no_answer_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.core.client.Client.spend", lambda client, charge: None)
    settings = private()
    grid = grid_at(tmp_path, settings)
    answer = build_node(settings, grid.configs[10], tmp_path / "10").answer(training_ask(over(grid, settings), "big"))
    assert "guarantees privacy, but trained without reporting its cost" in answer.control["problem"]


def test_virtual_nodes_of_a_simulation_keep_no_account(tmp_path: Path) -> None:
    settings = private()
    assert build_node(settings, {"partition-id": 0, "num-partitions": 3}, tmp_path).account is None


def training_ask(experiment: Experiment, client: str) -> WireMessage:
    backend = experiment.backend
    assert isinstance(backend, FlowerBackend)
    return backend.message_for(Encoder(), experiment.server.request("train", [client]), client)


def test_the_command_shows_an_account_by_run(tmp_path: Path, polyfed: Command) -> None:
    path = tmp_path / "privacy.jsonl"
    NodeAccount(path).spend(STEP, "pen", "a" * 32, 1)
    NodeAccount(path).spend(STEP, "pen", "b" * 32, 1)
    found = polyfed("audit", "spent", path, "--json").json
    assert found["epsilon"] == spent_by([STEP, STEP], 1e-5)
    assert set(found["runs"]) == {"a" * 32, "b" * 32}
    assert "total" in polyfed("audit", "spent", path).out
    assert polyfed("audit", "spent", path, "--delta", "2").code == 2
    missing = polyfed("audit", "spent", tmp_path / "none")
    assert (missing.code, "No privacy ledger at" in missing.err) == (2, True)
