"""The benchmarks do what they say: the works build, the loop they compare with is the same algorithm, and the text follows from the data."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.paths import BENCHMARKS
from polyfed.core.client import batch_indices
from polyfed.core.seeds import generator
from polyfed.runs.experiment import Experiment


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_works_are_those_of_the_issue() -> None:
    works = load("works")
    a, b, c, d = (works.WORKS[letter] for letter in "abcd")
    assert (a.clients, a.a_round, a.samples, a.batch) == (100, 10, 72, 4)
    assert (b.clients, b.a_round, b.samples, b.batch) == (5, 5, 743, 32)
    assert (c.clients, c.a_round, c.samples, c.batch) == (1000, 100, 37, 2)
    assert (d.clients, d.a_round, d.samples, d.batch, d.size) == (4, 4, 256, 32, 64)
    count = sum(parameter.numel() for parameter in works.build_model(a).parameters())
    assert 110_000 < count < 120_000


@pytest.mark.parametrize("letter", ["a", "b", "c", "d", "e1"])
def test_a_tiny_work_builds_and_its_loop_changes_the_model(letter: str) -> None:
    works = load("works")
    work = works.chosen(letter, quick=True)
    clients, model = works.federation(work).clients, works.build_model(work)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    average = works.hand_written_round(
        model, state, clients[: work.a_round], lambda client: works.batch_positions(len(client.train), work.batch)
    )
    assert average.keys() == state.keys()
    assert any(not torch.equal(average[name], state[name]) for name in state)


@pytest.mark.parametrize("letter", ["a", "c", "d"])
def test_the_loop_and_polyfed_give_the_same_average(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works, side = load("works"), load("side_polyfed")
    work = works.chosen(letter, quick=True)
    settings = side.settings_for(work, 1)
    data, model = works.federation(work), works.build_model(work)
    # Both prepare images alike up to rounding, but one rounding can flip a ReLU or a pooling tie of ResNet-18: compare on equal inputs.
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 3, 1, 1)
    torch.testing.assert_close(works.prepared(pixels), data.preparation.for_training(pixels), rtol=0, atol=3e-7)
    monkeypatch.setattr(works, "prepared", data.preparation.for_training)
    state = copy.deepcopy(model.state_dict())
    experiment = Experiment(settings, data, "fedavg", copy.deepcopy(model))
    experiment.server.begin(1, 0)
    chosen = experiment.server.sample()
    experiment.server.round = 0
    cohort = [client for client in data.clients if client.id in chosen]
    assert len(cohort) == work.a_round

    def order(client: Any) -> Any:
        return batch_indices(len(client.train), settings, True, generator(settings.seed, "client", 1, client.id), client.id)

    by_hand = works.hand_written_round(model, state, cohort, order)
    experiment.train()
    for name, value in experiment.server.state.items():
        torch.testing.assert_close(value, by_hand[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    works = load("works")
    sizes = [len(chunk) for chunk in works.batch_positions(37, 2)]
    assert sizes == [2] * 17 + [3]


@pytest.mark.slow
def test_contenders_run_rounds_when_told(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_speed.py"), "--quick", "--works", "a", "--contenders", "loop,polyfed"]
    out = tmp_path / "results.json"
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=300, check=False, env=plain_environment()
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["speed"]["a"]
    for name in ("loop", "polyfed"):
        record = found["contenders"][name]
        assert len(record["turns"]) == 1 and record["turns"][0] > 0
        assert record["first_round_ended_after"] > record["first_round"] > 0
        assert record["memory"] > 50 * 2**20
    assert str(tmp_path) not in found["measured"]["command"]


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_an_unknown_setting_means_cannot_take_part() -> None:
    side, turns, works = load("side_polyfed"), load("turns"), load("works")
    with pytest.raises(turns.CannotTakePart, match="no setting 'teleport'"):
        side.settings_for(works.chosen("a", quick=True), 1, teleport="on")


def test_the_ordinary_path_is_not_reported_as_a_fast_one() -> None:
    side, turns, works = load("side_polyfed"), load("turns"), load("works")
    work = works.chosen("a", quick=True)
    experiment = Experiment(side.settings_for(work, 1), works.federation(work), "fedavg", works.build_model(work))
    side.require_own_path(experiment, {})
    for options in ({"backend": "fused"}, {"workers": "2"}):
        with pytest.raises(turns.CannotTakePart):
            side.require_own_path(experiment, options)


def test_a_tree_of_processes_is_found_measured_and_stopped() -> None:
    processes = load("processes")
    inner = "import time; time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer]) as parent:
        try:
            deadline = time.monotonic() + 20
            while len(processes.tree(parent.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            members = processes.tree(parent.pid)
            assert members[0] == parent.pid and len(members) == 2
            assert processes.resident_bytes(members) > processes.resident_bytes([parent.pid]) > 0
        finally:
            processes.signal_all(processes.tree(parent.pid), processes.signal.SIGKILL)


def record(turns: list[float], first: float = 10.0, memory: int = 2**30) -> dict[str, Any]:
    return {"turns": turns, "processor": turns, "memory": memory, "first_round_ended_after": first, "first_round": first - 5}


def measured() -> dict[str, Any]:
    return {
        "date": "2026-01-01 00:00 UTC",
        "commit": "abc",
        "command": "benchmarks/bench_speed.py",
        "machine": "M",
        "load_before": 0.0,
        "versions": {"torch": "2"},
    }


def example() -> dict[str, Any]:
    large = {"loop": record([10.0, 10.0, 10.0]), "polyfed": record([10.0, 10.2, 10.4]), "workers": record([7.0, 7.0, 7.0])}
    small = {
        "loop": record([1.0, 1.0, 1.0]),
        "workers": record([0.5, 0.5, 0.5]),
        "fused": {"absent": "missing: not yet"},
        "pfl": record([1.2, 1.2, 1.2]),
        "pfl_2_threads": record([0.8, 0.8, 0.8]),
        "flower": record([1.0, 1.0, 1.0], first=40.0),
    }
    facts = {"repeats": 3, "rounds_a_turn": 1, "quick": False, "measured": measured()}
    counts = {
        "10": {"rounds": [1.0, 1.0], "grown": 100, "local": 100, "resident": 1},
        "10000": {"rounds": [1.0, 1.02], "grown": 300_000, "local": 100_000, "resident": 1},
    }
    return {
        "speed": {"a": {"title": "A", "contenders": small} | facts, "b": {"title": "B", "contenders": large} | facts},
        "growth": {
            "clients": {"counts": counts, "measured": measured()},
            "rounds": {"rounds": 200, "memory": [], "bytes_a_round": 100_000.0, "measured": measured()},
        },
    }


def test_the_text_has_the_figures_and_the_verdicts() -> None:
    text = load("write_results").document(example())
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows["(b) in process, at most 1.03 of the loop"].endswith("| 1.02 (1.01 to 1.03) | reached |")
    assert rows["(b) 2 workers, at most 0.68 of the loop"].endswith("| 0.70 (0.70 to 0.70) | **not reached** |")
    assert rows["(b) in process with 2 threads, at most 1.03 of the loop with 2 threads"].endswith("not measured |")
    best = rows["(a) at least 1.8 times the rounds per second of pfl-research at its best thread count"]
    assert best.endswith("| 1.60 (1.60 to 1.60), by polyfed, 2 workers | **not reached** |")
    assert rows["(a) 2 workers, not compiled, at least 1.3 times pfl-research at its best thread count"].endswith("| reached |")
    assert rows["(a) at least 2.5 times Flower's simulation"].endswith("| **not reached** |")
    assert "| 4.0 | reached |" in rows["(a) polyfed, 2 workers: first finished round at least 3 times sooner than Flower's"]
    assert rows["memory for 10,000 idle clients, less than 2 times their local entries"].endswith(
        "| 3.00 times | **not reached** |"
    )
    assert rows["no growth over 200 rounds (second half, by a line: less than 0.5 MB)"].endswith("| +9.54 MB | **not reached** |")
    assert "missing: not yet" in rows["polyfed, fused"]


def test_the_text_is_rebuilt_from_the_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, results = load("write_results"), load("results")
    data, text = tmp_path / "results.json", tmp_path / "results.md"
    for letter, facts in example()["speed"].items():
        results.put(data, "speed", letter, facts, ["bench_speed.py"])
    monkeypatch.setattr(sys, "argv", ["write_results.py", "--data", str(data), "--out", str(text)])
    write.main()
    assert text.read_text() == write.document(json.loads(data.read_text()))
    assert "## (a) A" in text.read_text()


class Event:
    """An operator as torch's profiler tells it."""

    def __init__(self, name: str, microseconds: float, parent: Event | None = None) -> None:
        self.name, self.self_cpu_time_total, self.cpu_parent = name, microseconds, parent


def test_operators_count_with_what_they_are_part_of() -> None:
    module = load("profile_round")
    step = Event("Optimizer.step#SGD.step", 50_000)
    backward = Event("autograd::engine::evaluate_function: ConvolutionBackward0", 0)
    events = [
        step,
        Event("aten::add_", 50_000, step),
        backward,
        Event("aten::convolution_backward", 300_000, backward),
        Event("aten::empty", 100_000, backward),
        Event("aten::native_batch_norm", 200_000),
        Event("aten::addmm", 60_000),
        Event("aten::max_pool2d", 40_000),
        Event("aten::copy_", 100_000),
    ]
    shares = module.by_operator(events, 1.0)
    assert shares == pytest.approx(
        {
            "the optimizer": 0.1,
            "convolution": 0.4,
            "batch norm": 0.2,
            "linear layers": 0.06,
            "pooling, activation and loss": 0.04,
            module.OTHER: 0.1,
            module.PYTHON: 0.1,
        }
    )
    owners = dict.fromkeys((module.WAITING, module.TORCH, module.REST), 0.0) | {module.POLYFED: 0.04, module.TORCH_PYTHON: 0.06}
    watch = module.Watch(2, operators=True)
    watch.seconds["plain"], watch.own = 3.0, 2.0
    text = module.words("Work (a), polyfed", watch, shares, owners)
    assert text.startswith(
        "Work (a), polyfed: 1.50 s a round, 1.00 s of processor time. The network's arithmetic takes 70% of the time, the optimizer 10%."
    )
    assert "By kind: 40% convolution, 20% batch norm" in text and "at most 4.0% polyfed's own" in text


def test_a_function_of_python_counts_for_whoever_called_it() -> None:
    module = load("profile_round")
    ours, theirs = ((sys.modules[kind.__module__].__file__, 1, "f") for kind in (Experiment, torch.nn.Module))
    statistics = type("Statistics", (), {})()
    statistics.stats = {
        ours: (1, 1, 1.0, 9.0, {}),
        theirs: (1, 1, 2.0, 2.0, {ours: (1, 1, 2.0, 2.0)}),
        ("~", 0, "<built-in method torch.conv2d>"): (1, 1, 4.0, 4.0, {theirs: (1, 1, 4.0, 4.0)}),
        ("~", 0, "<built-in method builtins.len>"): (2, 2, 1.0, 1.0, {ours: (1, 1, 0.75, 0.75), theirs: (1, 1, 0.25, 0.25)}),
        ("~", 0, "<method 'poll' of 'select.poll' objects>"): (1, 1, 2.0, 2.0, {ours: (1, 1, 2.0, 2.0)}),
    }
    wanted = {module.WAITING: 0.2, module.TORCH: 0.4, module.POLYFED: 0.175, module.TORCH_PYTHON: 0.225, module.REST: 0.0}
    assert module.by_owner(statistics) == pytest.approx(wanted)


def test_profiles_say_what_they_found_and_the_page_quotes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, write = load("profile_round"), load("write_results")
    only = "a-polyfed,a-fused,a-workers"
    # what is found with the command's allocator settings is not at stake here, and they would stay for all other tests
    monkeypatch.setattr(module, "keep_freed_pages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["profile_round.py", "--quick", "--only", only, "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(write, "PROFILES", tmp_path)
    page = write.document(example())
    for name in only.split(","):
        origin, said, *tables = (tmp_path / f"{name}.txt").read_text().split("\n\n")
        assert origin.startswith(f"benchmarks/profile_round.py --quick --only {only}, commit ")
        assert str(tmp_path) not in origin
        assert f"[{name}.txt](profiles/{name}.txt): {said} `{origin}`" in page
        shares = [float(line.split("%")[0]) for line in tables[0].splitlines()]
        assert sum(shares) == pytest.approx(100, abs=0.5)
        assert "waits for its workers" in said if name == "a-workers" else "% convolution" in said


def test_every_profile_of_the_issue_is_taken_and_its_steps_are_whole() -> None:
    module, works = load("profile_round"), load("works")
    wanted = {"a-polyfed", "b-polyfed", "c-polyfed", "d-polyfed", "a-fused", "c-fused", "a-workers"}
    assert {case.name for case in module.CASES} == wanted
    for case in module.CASES:
        cut, whole = case.work(quick=False), works.chosen(case.letter)
        assert (cut.model, cut.batch, cut.size) == (whole.model, whole.batch, whole.size)
        assert cut.samples % cut.batch == 0 or cut.samples == whole.samples


def test_the_page_says_why_turns_have_several_rounds() -> None:
    data = example()
    data["speed"]["a"]["rounds_a_turn"] = 8
    text = load("write_results").document(data)
    assert "(SIGSTOP)" in text
    assert "so short turns suffer; that is why a turn of (a) has 8 rounds, of which the mean counts." in text
