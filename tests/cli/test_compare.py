"""Comparisons: the table matches the runs, runs are reused, and a failed method does not stop the others."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.command_line import SHORT, STOPPER, Command, says
from polyfed.core.evaluation import Row
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.result import accuracy_table
from polyfed.studies.report.run_record import RunRecord, joined
from polyfed.studies.report.run_set import Column, MethodRow, Number, RunSet
from polyfed.studies.report.words import percent


def record(accuracies: dict[str, float], seed: int = 0, view: str = "seen", count: int = 100, **numbers: float) -> RunRecord:
    """A run of two clients and five rounds, without training."""
    lines = [
        {
            "round": 5,
            "view": view,
            "client": name,
            "domain": name,
            "accuracy": p,
            "standard_error": (p * (1 - p) / count) ** 0.5,
            "count": count,
            "class_counts": [count],
            **numbers,
        }
        for name, p in accuracies.items()
    ]
    costs = {
        "bytes": {"up": {"training": {"weight": 1000}}, "down": {"training": {"weight": 3000}}},
        "messages": {},
        "seconds": {"training": 2.0 + seed},
    }
    settings = {"seed": seed, "unseen": list(accuracies) if view == "unseen" else []}
    document = {"settings": settings, "data": {"clients": 2, "test_sizes": {view: dict.fromkeys(accuracies, count)}}}
    return RunRecord(f"run{seed}", document, lines, reached=5, finished=True, costs=costs)


def row_of(method: str, *records: RunRecord, measure: str = "accuracy") -> MethodRow:
    return MethodRow(method, records, measure)


def test_one_seed_has_binomial_errors() -> None:
    row = row_of("fedavg", record({"a": 0.5, "b": 0.8}))
    assert percent(row.seen["a"].value, row.seen["a"].error) == "50.0 ±5.0"
    assert row.seen["b"].error == pytest.approx(0.04)
    assert row.mean is not None and row.worst is not None
    assert row.mean.error == pytest.approx((0.05**2 + 0.04**2) ** 0.5 / 2)
    assert (row.worst.value, row.worst.error) == (0.5, 0.05)
    assert (row.bytes_up, row.bytes_down, row.seconds) == (100, 300, 2.0)


def test_several_seeds_have_sample_deviations() -> None:
    row = row_of("fedavg", record({"a": 0.5, "b": 0.8}, 0), record({"a": 0.6, "b": 0.5}, 1))
    assert row.seen["a"] == Number(pytest.approx(0.55), pytest.approx(0.1 / 2**0.5), (0.5, 0.6))
    assert row.worst is not None and row.worst.values == (0.5, 0.5)
    assert row.seconds == 2.5 and row.runs == ("run0", "run1")


def best_of(runs: RunSet) -> dict[str, list[str]]:
    return {column.name: [row.method for row in runs.best(column)] for column in runs.all_columns()}


def test_best_of_each_column_unless_all_are_equal() -> None:
    runs = RunSet([row_of("x", record({"a": 0.5, "b": 0.8})), row_of("y", record({"a": 0.6, "b": 0.8}))])
    assert best_of(runs) == {"a": ["y"], "b": [], "mean": ["y"], "worst": ["y"]} and runs.cheapest("bytes_up") == []
    assert runs.best(Column("spread", "seen", ("", "spread"))) == []


def test_the_smallest_error_is_the_best_and_the_largest_the_worst() -> None:
    errors = {"x": 0.1, "y": 0.3}
    rows = [
        row_of(name, record({"a": 0.5, "b": 0.5}, calibration_error=e), measure="calibration_error") for name, e in errors.items()
    ]
    runs = RunSet(rows)
    assert best_of(runs) == {name: ["x"] for name in ("a", "b", "mean", "worst")}
    assert [row.method for row in runs.ranked("seen")] == ["x", "y"]
    uneven = [Row("seen", d, d, {"accuracy": 0.5, "count": 10, "calibration_error": e}) for d, e in (("a", 0.1), ("b", 0.4))]
    assert accuracy_table(uneven, "calibration_error")["worst"] == 0.4 and accuracy_table(uneven)["worst"] == 0.5


def test_methods_that_pool_data_are_never_the_best() -> None:
    central = record({"a": 0.9, "b": 0.9})
    pooled = replace(central, document={**central.document, "method": {"text": "central", "pools_data": True}})
    runs = RunSet([row_of("x", record({"a": 0.5, "b": 0.8})), row_of("y", record({"a": 0.6, "b": 0.7})), row_of("central", pooled)])
    assert best_of(runs) == {"a": ["y"], "b": ["x"], "mean": [], "worst": ["y"]}
    assert [row.method for row in runs.ranked("seen")] == ["central", "x", "y"]


def test_leave_one_out_runs_are_joined() -> None:
    parts = [record({"a": 0.5}, view="unseen"), record({"b": 0.7}, view="unseen")]
    row = row_of("x", joined(parts, ["a", "b"]))
    columns = RunSet([row]).all_columns()
    assert {c.name: row.number(c.view, c.key)[0] for c in columns} == {"a": 0.5, "b": 0.7, "mean": 0.6, "worst": 0.5}  # type: ignore[index]
    assert row.bytes_up == 100


def test_a_shared_problem_is_printed_once(polyfed: Command, images: Path) -> None:
    ended = polyfed("compare", images, "--methods", "fedavg; fedbn", *SHORT, "--loss", "focal")
    assert ended.code == 2 and ended.out.count("could not be run") == 1
    assert "fedavg; fedbn could not be run: There is no loss called 'focal'" in " ".join(ended.out.split())


def test_compare_reuses_runs_and_continues_after_a_failure(polyfed: Command, images: Path) -> None:
    command = (
        "compare",
        images,
        "--methods",
        "fedavg; fedbn; no_norm + fedbn; fedavg",
        *SHORT,
        "--seeds",
        "2",
        "--explain",
        "--json",
    )
    first = polyfed(*command)
    assert first.code == 2
    assert [row["method"] for row in first.json["methods"]] == ["fedavg", "fedbn", "fedbn + no_norm"]
    assert "no batch norm" in first.json["methods"][2]["problem"] and "could not be run" in first.out
    assert first.err.index("Skipping fedbn + no_norm") < first.err.index("fedavg, seed 0: accuracy: mean of 2 seen domains")
    fedbn = first.json["methods"][1]
    alone = [polyfed("run", images, "--method", "fedbn", *SHORT, "--seed", seed, "-q", "--json").json for seed in ("0", "1")]
    for domain in ("day", "night"):
        values = [run["accuracy"]["seen"][domain] for run in alone]
        result = fedbn["accuracy"]["seen"][domain]
        assert result["values"] == values
        assert result["error"] == pytest.approx(statistics.stdev(values))
    assert fedbn["bytes_up_per_client_and_round"] == alone[0]["bytes_up"] / (2 * 2)
    assert "sample standard deviation over 2 seeds" in first.out and "Test images: day 8, night 8" in " ".join(first.out.split())
    written = {path: path.stat().st_mtime_ns for path in Path("runs/compare-pictures").rglob("*") if path.is_file()}
    again = polyfed(*command)
    assert again.json["methods"] == first.json["methods"]
    assert {p: p.stat().st_mtime_ns for p in Path("runs/compare-pictures").rglob("*") if p.is_file()} == written
    longer = polyfed(*command, "--rounds", "3", "-q").json["methods"][0]
    assert longer["runs"] == ["runs/compare-pictures/fedavg-seed0-2", "runs/compare-pictures/fedavg-seed1-2"]


def test_leave_one_out(polyfed: Command, images: Path) -> None:
    ended = polyfed("compare", images, "--methods", "fedavg", *SHORT, "--protocol", "leave-one-out", "--explain", "--json")
    assert ended.code == 0, ended.err
    row = ended.json["methods"][0]
    assert set(row["accuracy"]["unseen"]) == {"day", "night"} and row["accuracy"]["seen"] == {}
    one = polyfed("run", images, *SHORT, "--unseen", "day", "--unseen-part", "all", "-q", "--json").json
    assert row["accuracy"]["unseen"]["day"]["values"] == [one["accuracy"]["unseen"]["day"]]
    pictures = len([path for path in (images / "day").rglob("*") if path.is_file()])
    assert [score["count"] for score in one["scores"] if score["view"] == "unseen"] == [pictures]
    assert len(row["runs"]) == 2 and "all images of a domain held out of training" in " ".join(ended.out.split())
    assert f"day {pictures}" in " ".join(ended.out.split())


def test_compare_loads_custom_methods_and_resumes_interrupted_runs(polyfed: Command, images: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    (tmp_path / "stop").touch()
    command = ("compare", images, "--methods", "fedbn; fedbn + stopper", "--load", "stopping.py", *SHORT, "-q", "--json")
    stopped = polyfed(*command)
    assert stopped.code == 130 and "Run the same command again to resume" in stopped.err
    (tmp_path / "stop").unlink()
    again = polyfed(*(word for word in command if word != "-q"))
    rows = again.json["methods"]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert "fedbn + stopper, seed 0: accuracy: mean" in again.err and "resumed" in again.err
    assert "Reusing 1 of 2 runs from runs/compare-pictures." in again.err


def test_rounds_of_a_budget_are_reported(polyfed: Command, images: Path) -> None:
    result = polyfed("compare", images, "--methods", "fedavg", *SHORT[2:], "--total-epochs", "3", "-q", "--json").json
    assert result["rounds"] == 3


def test_compare_skips_a_run_that_another_process_trains(polyfed: Command, images: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    (tmp_path / "stop").touch()
    command = ("compare", images, "--methods", "fedbn + stopper; fedavg", "--load", "stopping.py", *SHORT, "--json")
    assert polyfed(*command).code == 130
    (tmp_path / "stop").unlink()
    run = Path("runs/compare-pictures/fedbn-stopper-seed0")
    before = (run / "metrics.jsonl").read_bytes()
    with RunFolder(run).locked():
        ended = polyfed(*command)
    busy, free = ended.json["methods"]
    assert ended.code == 2 and f"Process {os.getpid()} on" in busy["problem"]
    assert "fedbn + stopper failed" in ended.err and free["problem"] is None
    assert (run / "metrics.jsonl").read_bytes() == before
    assert polyfed(*command).code == 0


AT_ONCE = ("compare", "digits-mini(per_domain=20)", "--methods", "fedavg; fedbn", "--rounds", "1", "--out", "both", "--json")


def started(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "polyfed", *AT_ONCE]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_compares_on_one_folder_share_the_work(tmp_path: Path) -> None:
    both = [started(tmp_path) for _ in range(2)]
    ended = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], [err for _, err in ended]
    first, second = (json.loads(out.splitlines()[-1])["methods"] for out, _ in ended)
    assert [m["problem"] for m in first + second] == [None] * 4
    assert [m["accuracy"] for m in first] == [m["accuracy"] for m in second]
    assert [m["runs"] for m in first] == [m["runs"] for m in second]
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["fedavg-seed0", "fedbn-seed0"]
    trained = [err.count("%, trained") for _, err in ended]
    assert sum(trained) == 2, [err for _, err in ended]


def test_compare_waits_for_a_run_of_another_process(polyfed: Command, tmp_path: Path) -> None:
    folder = tmp_path / "both" / "fedavg-seed0"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline() == "held\n"
    other = started(tmp_path)
    assert other.stderr is not None
    notices = ""
    while "waiting for it" not in notices:
        line = other.stderr.readline()
        assert line, notices
        notices += line
    assert f"Process {holder.pid} on" in notices
    assert "fedbn, seed 0: accuracy: mean" in notices  # the others are trained first
    holder.communicate("", timeout=60)
    out, _ = other.communicate(timeout=300)
    assert holder.returncode == 0 and other.returncode == 0
    assert [m["problem"] for m in json.loads(out.splitlines()[-1])["methods"]] == [None, None]


HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from polyfed import run
from polyfed.runs.folder.run_folder import RunFolder
folder = Path(sys.argv[1])
run("digits-mini(per_domain=20)", "fedavg", rounds=1, out=folder)
for file in (folder / "checkpoint").rglob("*"):
    file.unlink() if file.is_file() else None
(folder / "metrics.jsonl").write_text("")
with RunFolder(folder).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_other_images_make_another_run(polyfed: Command, images: Path) -> None:
    command = ("compare", images, "--methods", "fedavg", *SHORT, "-q", "--json")
    (first,) = polyfed(*command).json["methods"]
    (run,) = first["runs"]
    for number in range(20, 40):
        shutil.copy(images / "day" / "disk" / f"{number - 20:02d}.png", images / "day" / "disk" / f"{number:02d}.png")
    (second,) = polyfed(*command).json["methods"]
    assert second["runs"] == [f"{run}-2"]
    assert polyfed(*command).json["methods"][0]["runs"] == [f"{run}-2"]
    says(polyfed("resume", run), "has changed since the run was started: client day has", "Restore the original data")


def test_bad_comparisons_get_one_sentence(polyfed: Command, images: Path) -> None:
    says(polyfed("compare", images, "--methods", "fedavg; fedbm"), "Did you mean fedbn?")
    says(polyfed("compare", images, "--methods", " ; "), "No methods")
    says(polyfed("compare", images, "--methods", "fedavg", "--seeds", "0"), "seeds must be at least 1, got 0.")
    says(polyfed("compare", images, "--methods", "fedavg", "--protocol", "loo"), "leave-one-out")
    says(polyfed("compare", images), "--methods")
    assert not Path("runs").exists()
