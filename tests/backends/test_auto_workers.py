"""``--workers auto``, the default: in process at first, in worker processes once they repay their start, with the same results."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from helpers.command_line import SHORT, Command
from helpers.watching import AfterRound
from polyfed.backends import pace, process_memory
from polyfed.backends import workers as workers_module
from polyfed.backends.pace import Pace
from polyfed.backends.workers import Workers
from polyfed.core.client import Client
from polyfed.core.data_types import DatasetExamples
from polyfed.core.method import Method
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.lifecycle import resume
from polyfed.runs.result import Result
from polyfed.studies.compare import estimate
from polyfed.testing import TinyNet, tiny_federation

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers need Linux: os.fork and os.memfd_create")

SIZES = {"a": 13, "b": 9, "c": 8, "d": 7, "e": 5}
METHODS = ("fedavg", "fedbn", "scaffold", "hfedf(warmup=1)")
BUFFER = 60_000_000


@pytest.fixture(autouse=True)
def two_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(workers_module, "free_processes", lambda: 2)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any predicted work repays the start of workers."""
    monkeypatch.setattr(pace, "SECONDS_REPAID", 0.0)
    monkeypatch.setattr(pace, "SECONDS_SENT", 0.0)


def trained(method: str | Method = "fedavg", **changes: Any) -> Result:
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 3, "batch_size": 4, "lr": 0.05} | changes
    return pf.run(values.pop("data", tiny_federation(SIZES)), method, TinyNet(), **values)


def recorded_processes(folder: Path) -> Callable[[Client], None]:
    """Return a hook that writes which process trains a client in a round."""

    def record(client: Client) -> None:
        (folder / f"{client.round}{client.id}").write_text(str(os.getpid()))

    return record


def here(folder: Path) -> str:
    """Return the rounds and clients that this process trained."""
    return " ".join(sorted(path.name for path in folder.iterdir() if path.read_text() == str(os.getpid())))


def test_it_is_the_default_and_short_runs_stay_in_one_process(polyfed: Command, images: Path, tmp_path: Path) -> None:
    ended = polyfed("run", images, *SHORT, "--out", tmp_path / "run")
    assert ended.code == 0 and "processes from now on" not in ended.err
    assert 'workers = "auto"' in (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "pids").mkdir()
    trained(Method("records", before_training=(recorded_processes(tmp_path / "pids"),)))
    assert here(tmp_path / "pids") == "1a 1b 1c 1d 1e 2a 2b 2c 2d 2e 3a 3b 3c 3d 3e"


def test_the_switch_is_in_the_middle_of_a_round_and_printed_once(
    polyfed: Command, images: Path, tmp_path: Path, eager: None
) -> None:
    (tmp_path / "pids").mkdir()
    trained(Method("records", before_training=(recorded_processes(tmp_path / "pids"),)))
    assert here(tmp_path / "pids") == "1a 1b" and len(list((tmp_path / "pids").iterdir())) == 15
    ended = polyfed("run", images, *SHORT, "--out", tmp_path / "run")
    assert ended.err.count("Round 2: from now on in 2 processes, with the same results. Use --workers 1 for one.") == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_switch_changes_no_bits(method: str, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(method, workers="1")
    at_once = trained(method)
    repays = Pace.repays_workers
    monkeypatch.setattr(Pace, "repays_workers", lambda self, tasks: self.round > 1 and repays(self, tasks))
    later = trained(method)
    for found in (at_once, later):
        assert found.digest == wanted.digest and found.rows == wanted.rows
        assert isinstance(found.experiment.backend, Workers) and found.experiment.backend.cpu_seconds > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_switches_again_and_changes_no_bits(method: str, eager: None, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(run: RunState) -> None:
        if run.round == 2:
            raise Stop

    with pytest.raises(Stop):
        trained(method, rounds=4, out=tmp_path / "run", checkpoint_every="1", callbacks=[AfterRound(stop)])
    torch.manual_seed(3)
    found = resume(tmp_path / "run", tiny_federation(SIZES), Reopening(model=TinyNet()))
    assert isinstance(found.experiment.backend, Workers) and found.experiment.backend.cpu_seconds > 0
    assert found.digest == trained(method, rounds=4, workers="1").digest


@pytest.mark.parametrize("workers", ["2", "auto"])
def test_run_folders_contain_everything_that_one_process_records(workers: str, eager: None, tmp_path: Path) -> None:
    one, several = (trained("fedbn", out=tmp_path / number, workers=number) for number in ("1", workers))
    assert [key[0] for key in several.answers] == ["seen"] * 5 + ["unseen"]
    assert list(several.answers) == list(one.answers)
    for key, found in one.answers.items():
        assert found.keys() == several.answers[key].keys() and len(found["labels"]) == 6
        assert all(torch.equal(value, several.answers[key][name]) for name, value in found.items())
    for name in ("answers.safetensors", "metrics.jsonl"):
        files = [tmp_path / number / name for number in ("1", workers)]
        if files[0].exists():
            assert files[0].read_bytes() == files[1].read_bytes()
    costs = [result.experiment.costs.numbers() for result in (one, several)]
    for what in ("bytes", "messages", "once"):
        assert costs[0][what] == costs[1][what]
    for what in ("seconds", "cpu_seconds", "memory"):
        assert costs[0][what].keys() == costs[1][what].keys()


@pytest.mark.skipif(not process_memory.reset_peak(), reason="this system cannot tell the peak memory of a part of a run")
def test_costs_are_those_of_all_workers_in_training() -> None:
    import time

    def burn(client: Client) -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        torch.ones(BUFFER // 4)

    def predict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.ones(BUFFER)
        return model(x).softmax(dim=1)  # type: ignore[no-any-return]

    found = trained(Method("busy", before_training=(burn,), predict=predict), workers="2", evaluate_every=1).experiment.costs
    idle = trained(Method("idle", predict=predict), workers="2", evaluate_every=1).experiment.costs
    assert found.cpu_seconds["training"] - idle.cpu_seconds["training"] > 0.8 * 3 * 5 * 0.05
    assert 1.8 * BUFFER < found.memory["increase"] - idle.memory["increase"] < 2.2 * BUFFER
    assert idle.memory["increase"] < BUFFER, "the buffers of evaluations do not count"
    assert found.memory["peak"] > found.memory["increase"]


def torch_data() -> dict[str, Any]:
    """Return data whose items are read one by one, possibly from one open file."""
    parts = {client.id: (client.train, client.tests[client.id]) for client in tiny_federation(SIZES).clients}

    def items(examples: Any) -> DatasetExamples:
        return DatasetExamples(torch.utils.data.TensorDataset(*examples.batch(slice(None))))

    return {name: tuple(map(items, pair)) for name, pair in parts.items()}


def test_what_could_change_the_results_stays_in_one_process(eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = "1a 1b 1c 1d 1e 2a 2b 2c 2d 2e"

    def trained_here(name: str, **changes: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        trained(Method(name, before_training=(recorded_processes(folder),)), rounds=2, **changes)
        return here(folder)

    assert trained_here("plain") == "1a 1b"
    assert trained_here("one-by-one", clients_per_round=1).count(" ") == 1
    assert trained_here("objects", loss=nn.CrossEntropyLoss()) == every
    assert trained_here("datasets", data=torch_data()) == every
    assert trained_here("threads", threads=2) == every
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    assert trained_here("child") == every
    monkeypatch.undo()
    assert trained_here("undone") == every


@pytest.mark.parametrize("forks", [0, 1])
def test_without_enough_processes_the_run_continues_with_fewer(
    forks: int, eager: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = trained("fedbn", workers="1").digest
    start, started = workers_module.Worker, []

    def limited(*arguments: Any) -> Any:
        if len(started) == forks:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(workers_module, "Worker", limited)
    assert trained("fedbn").digest == wanted and len(started) == forks
    expected = "Continuing in one process: cannot start worker processes (Resource temporarily unavailable)."
    assert caplog.text.count(expected) == 1 - forks


def test_a_run_whose_workers_are_killed_continues_in_one_process(
    eager: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    test, record = os.getpid(), recorded_processes(tmp_path)

    def need_memory(client: Client) -> None:
        if client.id == "d" and os.getpid() != test:
            os.kill(os.getpid(), signal.SIGKILL)
        record(client)

    found = trained(Method("greedy", before_training=(need_memory,)), rounds=2)
    assert here(tmp_path) == "1a 1b 1d 2a 2b 2c 2d 2e"
    assert caplog.text.count("Continuing in one process: the system killed workers, probably because memory ran out.") == 1
    assert found.digest == trained(rounds=2, workers="1").digest


def test_busy_cores_and_scarce_memory_leave_fewer_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(pace, "available_memory", lambda: None)
    found = []
    for load in (0.0, 1.1, 4.2, 8.3, 20.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found.append(pace.free_processes())
    assert found[:4] == [6, 6, 5, 1] and found[4] < 2
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(pace, "available_memory", lambda: 3000)
    monkeypatch.setattr(pace, "peak_size", lambda: 900)
    assert pace.free_processes() == 3


def test_estimates_assume_the_processes_that_auto_would_use(
    polyfed: Command, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimated(*options: str) -> list[int]:
        ended = polyfed("run", images, *SHORT, "--estimate", "--json", *options)
        return [run["workers"] for method in ended.json["methods"] for run in method["runs"]]

    assert estimated() == [1]
    monkeypatch.setattr(estimate, "SECONDS_REPAID", 0.0)
    assert estimated() == [2]
    assert estimated("--threads", "2") == estimated("--backend", "fused") == [1]
