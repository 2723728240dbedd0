"""The queue: runs in order and once each, killed and restarted, failures recorded and skipped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.records import made_record
from helpers.scripts import loaded
from polyfed.errors import RunFolderError, SettingError
from polyfed.papers.ledger import Ledger, loose_identity, read_record, recorded_settings
from polyfed.papers.recording import train_recorded

SCRIPT = ROOT / "benchmarks" / "queue"
SMALL = 'data = "digits-mini(per_domain=40)", model = "small_cnn", checkpoint_every = "1"'
LIST = f"""\
max_hours = 1.0

[[queue]]
experiment = "fedwon/figure-1"
seeds = [0, 1]
set = {{ {SMALL}, rounds = 60 }}

[[queue]]
experiment = "fedwon/figure-12"
seeds = 1
set = {{ {SMALL}, rounds = 60 }}

[[queue]]
name = "a command"
command = "{{python}} -c 'print(6 * 7)'"

[[queue]]
name = "a command that fails"
command = "{{python}} -c 'raise SystemExit(3)'"

[[queue]]
name = "no such data"
experiment = "fedwon/figure-1"
seeds = [0]
set = {{ data = "domainnet10", rounds = 1 }}

[[queue]]
name = "no such experiment"
experiment = "fedwon/figure-99"

[[queue]]
name = "too long"
experiment = "fixbn/table-5"
"""


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return loaded(ROOT / "benchmarks" / "queue_list.py")


def write_list(folder: Path, text: str = LIST) -> Path:
    path = folder / "queue.toml"
    path.write_text(text)
    return path


def test_a_diverged_run_does_not_run_again_for_its_analyses(lists: ModuleType, tmp_path: Path) -> None:
    processes = loaded(ROOT / "benchmarks" / "queue_processes.py")
    entry = {"experiment": "fedwon/figure-1", "seeds": [0]}
    (job,) = lists.expand([entry], "DATA").jobs
    record = dataclasses.replace(made_record("fedavg", 0, float("nan")), settings=recorded_settings(job.settings))
    assert job.analyses and processes.outcome(job, processes.Results(tmp_path), Ledger([record])) == "diverged"


RATE = {
    "experiment": "fedstein/table-1",
    "only": ["FedStein"],
    "columns": ["Digits-Five"],
    "seeds": [0, 1],
    "lr_from": "rates/rate.json",
}
SEARCH = {"name": "rate", "command": "{python} benchmarks/choose_rate.py fedstein/table-1 --log {results}/rates/rate.json"}
KEYS = loaded(ROOT / "benchmarks" / "choose_rate.py").KEYS
LOG = dict.fromkeys(KEYS, "") | {"grid": [0.01, 0.03], "validation": {"0.01": 0.5, "0.03": 0.7}, "failed": {}, "chosen": 0.03}


def test_an_entry_waits_for_its_learning_rate(lists: ModuleType, tmp_path: Path) -> None:
    folders = (tmp_path / "published", tmp_path / "results")
    before = lists.expand([SEARCH, RATE], "DATA", folders)
    assert [job.has_log for job in before.jobs] == [False] and "waits for rates/rate.json" in next(iter(before.problems.values()))
    for folder, rate in zip(reversed(folders), (0.01, 0.03), strict=True):  # that of the repository counts
        (folder / "rates").mkdir(parents=True)
        (folder / "rates" / "rate.json").write_text(json.dumps({"chosen": rate}))
        after = lists.expand([RATE], "DATA", folders)
        assert [(job.settings.seed, job.settings.lr) for job in after.jobs] == [(0, rate), (1, rate)] and not after.problems


def test_logs_of_rate_searches_are_imported_and_their_search_does_not_run_again(lists: ModuleType, tmp_path: Path) -> None:
    processes = loaded(ROOT / "benchmarks" / "queue_processes.py")
    results, published = processes.Results(tmp_path / "results"), tmp_path / "published"
    log = results.path / "rates" / "rate.json"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(LOG))
    assert (
        processes.import_rates(results, published / "rates")
        == processes.import_rates(results, published / "rates")
        == ["rate.json"]
    )
    log.unlink()  # the machine is lost
    search, *runs = lists.expand([SEARCH, RATE], "DATA", (published, results.path)).jobs
    assert processes.outcome(search, results, Ledger([])) == "finished" and [job.settings.lr for job in runs] == [0.03, 0.03]
    for change, words in (
        ({"chosen": 0.01}, "best validation score"),
        ({"commit": "other"}, "different content"),
        ({"source": "/home/me/x"}, "contains a local folder"),
    ):
        log.write_text(json.dumps({**LOG, **change}))
        with pytest.raises(RunFolderError, match=words):
            processes.import_rates(results, published / "rates")


def test_runs_that_entries_share_are_one_job_and_problems_are_named(lists: ModuleType, tmp_path: Path) -> None:
    found = lists.expand(lists.read_list(write_list(tmp_path)), "DATA")
    names = [(job.entry.split(";")[0], job.settings.seed if job.settings else None) for job in found.jobs]
    assert names == [
        ("fedwon/figure-1", 0),
        ("fedwon/figure-1", 1),
        ("a command", None),
        ("a command that fails", None),
        ("no such data", 0),
    ]
    assert all(job.analyses == ("norm-statistics",) for job in found.jobs if job.settings)
    assert set(found.problems) == {"no such experiment", "too long"} and "more than max_hours = 1.0" in found.problems["too long"]


def test_seeds_may_be_a_list_or_a_count_and_unknown_keys_are_errors(lists: ModuleType, tmp_path: Path) -> None:
    entry = 'experiment = "fedwon/table-1"\ncolumns = ["Digits-Five"]\nonly = ["FedBN", "FedWon"]\n'
    jobs = lists.expand(lists.read_list(write_list(tmp_path, f"[[queue]]\n{entry}seeds = [4, 2]\n")), "DATA").jobs
    assert [(job.settings.seed, job.settings.method.split()[0]) for job in jobs] == [
        (2, "fedbn"),
        (2, "fedwon"),
        (4, "fedbn"),
        (4, "fedwon"),
    ]
    assert len(lists.expand(lists.read_list(write_list(tmp_path, f"[[queue]]\n{entry}seeds = 3\n")), "DATA").jobs) == 6
    with pytest.raises(SettingError, match="'seed'"):
        lists.read_list(write_list(tmp_path, f"[[queue]]\n{entry}seed = 3\n"))
    with pytest.raises(SettingError, match="either experiment or command"):
        lists.read_list(write_list(tmp_path, f"[[queue]]\n{entry}command = 'x'\n"))


def test_the_shipped_list_names_experiments_rows_and_columns_that_exist(lists: ModuleType) -> None:
    listed = lists.read_list(ROOT / "benchmarks" / "queue.toml")
    entries = [{key: value for key, value in entry.items() if key not in ("max_hours", "lr_from")} for entry in listed]
    found = lists.expand(entries, "DATA")
    assert found.problems == {} and found.jobs[0].entry.startswith("fedwon/figure-1")
    known = Ledger.read(ROOT / "docs" / "results" / "runs")
    shared = [record for record in known.records if record.commit.startswith("3241a16")]
    assert len(shared) == 4 and not {record.file for record in shared} & {f"{job.key}.json" for job in found.jobs}
    for record in shared:
        more = [
            job.settings
            for job in found.jobs
            if job.settings and loose_identity(job.settings) == loose_identity(record.full_settings)
        ]
        seeds = {settings.seed for settings in more if settings.amp == record.full_settings.amp}
        assert seeds == {2, 3, 4}, "the next seeds of the shared runs belong to the same cell"


@pytest.mark.slow
def test_a_killed_queue_continues_to_the_same_digests(lists: ModuleType, tmp_path: Path) -> None:
    results, listed = tmp_path / "results", write_list(tmp_path)
    (tmp_path / "data").mkdir()
    words = [sys.executable, str(SCRIPT), "run", "--home", str(results / "queue"), "--root", str(tmp_path / "data")]
    words += ["--list", str(listed), "--cores", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def rounds() -> dict[str, int]:
        files = [path for path in (results / "jobs").glob("digits*.json") if not path.name.endswith(".job.json")]
        return {path.stem: json.loads(path.read_text()).get("round", 0) for path in files}

    queue = start()
    wait_for(lambda: len(rounds()) == 2 and min(rounds().values()) >= 5, queue)
    second = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert second.returncode != 0 and b"already works on" in second.stderr
    children = children_of(queue.pid)
    queue.send_signal(signal.SIGKILL)
    queue.wait()
    assert len(children) == 2
    wait_for(lambda: not any(is_alive(pid) for pid in children))
    assert not list((results / "ledger").glob("*.json")), "killed in the middle of both runs"
    queue = start()
    assert queue.wait(timeout=240) == 0
    records = [read_record(path) for path in sorted((results / "ledger").glob("*.json"))]
    assert [(record.seed, record.state) for record in records] == [(0, "finished"), (1, "finished")]
    progress = json.loads((results / "progress.json").read_text())
    assert progress["finished"] == 3 and progress["left"] == 0 and not progress["running"]
    assert "exit code 3" in progress["failed"]["command-a-command-that-fails"]
    assert len(progress["failed"]) == 2 and len(progress["not_expanded"]) == 2
    assert "finished 3, diverged 0, failed 2" in (results / "progress.txt").read_text()
    assert "42" in (results / "logs" / "command-a-command.log").read_text()
    jobs = lists.expand(lists.read_list(listed), str(tmp_path / "data")).jobs
    for job, record in zip(jobs[:2], records, strict=True):
        whole = train_recorded(job.settings, tmp_path / "whole")
        assert (whole.digest, whole.scores, whole.by_round) == (record.digest, record.scores, record.by_round)
        assert set(record.analyses) == {"norm-statistics"}


def wait_for(condition: object, process: subprocess.Popen[bytes] | None = None, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(each) for each in found]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
