"""The lock of a run folder: only one process trains a run, others get an error that names it, and an exited process locks nothing."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import recorded_runs
from helpers.processes import alive
from helpers.recorded_runs import Stopped, go_on
from helpers.watching import AfterRound
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.errors import RunFolderError
from polyfed.runs.folder import lock
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run

LONG = 60.0
experiment_of = functools.partial(recorded_runs.experiment_of, rounds=3)

pytestmark = pytest.mark.skipif(lock.fcntl is None, reason="this system has no such locks")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"
    }


def cut(folder: Path) -> None:
    def stop(server: Any) -> None:
        if server.round == 2:
            raise Stopped

    with pytest.raises(Stopped):
        train_run(experiment_of(), RunFolder(folder), callbacks=[AfterRound(stop)])


def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut(run)
    before = files(run)
    with RunFolder(run).locked():
        with pytest.raises(RunFolderError, match=rf"Process {os.getpid()} on .* is training .*run.*polyfed resume .*--out"):
            go_on(run)
        with pytest.raises(RunFolderError, match="is training"):
            train_run(experiment_of(), RunFolder(run))
        assert files(run) == before
    assert go_on(run).digest == train_run(experiment_of(), None).digest


def test_the_lock_is_held_while_it_trains_and_gone_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused: list[int] = []

    def look(server: Any) -> None:
        with pytest.raises(RunFolderError, match="is training"), RunFolder(run).locked():
            pass
        refused.append(server.round)

    train_run(experiment_of(), RunFolder(run), callbacks=[AfterRound(look)])
    assert refused == [1, 2, 3]
    assert sorted(path.name for path in run.iterdir()) == ["answers.safetensors", "checkpoint", "metrics.jsonl", "run.toml"]


def test_a_finished_run_can_be_read_by_many(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = train_run(experiment_of(), RunFolder(run))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with RunFolder(run).locked():
        assert go_on(run).digest == whole.digest
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path != run} == {
        path: changed for path, changed in before.items() if path != run
    }


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux")
def test_a_killed_run_is_free_at_once_though_its_workers_live_on(tmp_path: Path) -> None:
    """Workers forked by a thread do not end with their parent: here they outlive it during training."""
    (tmp_path / "workers").mkdir()

    def wait(client: Client) -> None:
        (tmp_path / "workers" / str(os.getpid())).touch()
        time.sleep(LONG)

    parent = os.fork()
    if parent == 0:
        try:
            experiment = experiment_of(Method("waits", before_training=(wait,)), workers="2")
            thread = threading.Thread(target=train_run, args=(experiment, RunFolder(tmp_path / "run")))
            thread.start()
            thread.join()
        finally:
            os._exit(1)
    end = time.monotonic() + LONG
    while len(list((tmp_path / "workers").iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    workers = [int(path.name) for path in (tmp_path / "workers").iterdir()]
    try:
        with pytest.raises(RunFolderError, match=f"Process {parent} on"), RunFolder(tmp_path / "run").locked():
            pass
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert len(workers) == 2 and all(map(alive, workers)), "the workers have ended, so that nothing is shown"
        assert (tmp_path / "run" / "lock").exists()
        with RunFolder(tmp_path / "run").locked():
            assert (tmp_path / "run" / "lock").read_text().startswith(f"{os.getpid()} ")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_that_runs_on_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holding = RunFolder(run).locked()
    holding.__enter__()
    child = os.fork()
    if child == 0:
        try:
            holding.__exit__(None, None, None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RunFolderError, match="is training"), RunFolder(run).locked():
        pass
    holding.__exit__(None, None, None)
    assert not list(run.iterdir())


def test_a_file_that_was_removed_meanwhile_is_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous holder may remove the file between opening and locking: the lock must be that of the existing file."""
    flock, times = lock.fcntl.flock, []

    def removed_first(descriptor: int, how: int) -> None:
        if not times:
            (tmp_path / "lock").unlink()
        times.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(lock.fcntl, "flock", removed_first)
    with RunFolder(tmp_path).locked():
        assert len(times) == 2 and (tmp_path / "lock").exists()
        with pytest.raises(RunFolderError, match="is training"), RunFolder(tmp_path).locked():
            pass


@pytest.mark.parametrize("lacking", ["system", "file system"])
def test_without_locks_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def none_here(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if lacking == "system":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", none_here)
    with RunFolder(tmp_path / "run").locked(), RunFolder(tmp_path / "run").locked():
        assert not list((tmp_path / "run").iterdir())
