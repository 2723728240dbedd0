"""Kill real processes at seeded points and let others go on; print one JSON line with the digests, and where each went on from.

Run by tests/runs/test_kill.py, and by hand: python tests/helpers/kill_harness.py METHOD POINTS SEED [SETTING=VALUE ...] ['kinds=["disk"]']
torch is imported once; every trial is a forked process of its own, killed with SIGKILL.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers load it on their first use: seconds in which every forked run would only wait

from polyfed.core.method import parse
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Checkpoints, digest
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation
from polyfed.trees import Piece

ROUNDS = 10
KINDS = ("file", "clock", "file", "start")
FAILED = 1
"""The exit code of a forked run that ended with an error."""


def net() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()


def start(folder: Path, method: str, changes: dict[str, Any], callbacks: Sequence[Callback] = ()) -> None:
    values = {"rounds": ROUNDS, "batch_size": 4, "checkpoint_every": "1", "evaluate_every": 2} | changes
    experiment = Experiment(Settings(method=method, **values), tiny_federation(), model=net())
    train_run(experiment, RunFolder(folder), callbacks)


def go_on(folder: Path, method: str, changes: dict[str, Any]) -> None:
    """Resume; a run killed before its run.toml starts again, as its user would. Notes every round that it holds."""

    class Note(Callback):
        def after_round(self, run: RunState) -> None:
            with rounds_file(folder).open("a") as file:
                file.write(f"{run.round}\n")

    if not (folder / "run.toml").exists():
        start(folder, method, changes, [Note()])
    else:
        resume(folder, data=tiny_federation(), how=Reopening(model=net()), callbacks=[Note()])


def rounds_file(folder: Path) -> Path:
    return folder.with_suffix(".rounds")


def went_on_from(folder: Path) -> int:
    """The round before the first one held after the kill; 0 where the run began again."""
    held = rounds_file(folder).read_text().split() if rounds_file(folder).exists() else []
    return max(int(held[0]) - 1, 0) if held else ROUNDS


def before_each_file(act: Callable[[Path, Sequence[Piece]], None]) -> None:
    """Let something happen before this process writes a file of a checkpoint."""
    write = Checkpoints._write_file

    def watched(self: Checkpoints, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        act(self.folder / name, data)
        write(self, name, data, sync)

    Checkpoints._write_file = watched  # type: ignore[method-assign]


def die_while_writing(call: int) -> None:
    """Kill this process in the middle of writing its n-th checkpoint file."""
    count = 0

    def half(path: Path, data: Sequence[Piece]) -> None:
        nonlocal count
        count += 1
        if count == call:
            whole = b"".join(data)
            path.with_name(f"{path.name}.part").write_bytes(whole[: len(whole) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_file(half)


def fill_disk(call: int) -> None:
    """Let the disk be full from the n-th checkpoint file on, in the middle of it."""
    count = 0

    def half(path: Path, data: Sequence[Piece]) -> None:
        nonlocal count
        count += 1
        if count >= call:
            whole = b"".join(data)
            path.with_name(f"{path.name}.part").write_bytes(whole[: len(whole) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before_each_file(half)


def forked(work: Callable[[], None]) -> int:
    """Do work in a process of its own; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_first_manifest(folder: Path, child: int) -> None:
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not any((folder / "checkpoint").glob("manifest-*.json")) and os.waitid(os.P_PID, child, ended) is None:
        time.sleep(0.001)


@dataclass(frozen=True)
class Whole:
    """A run that was never stopped: the checkpoint files it wrote, in order, and its seconds before and after the first manifest."""

    folder: Path
    files: tuple[str, ...]
    beginning: float
    rest: float

    @classmethod
    def held(cls, folder: Path, method: str, changes: dict[str, Any]) -> Whole:
        listing = folder.with_suffix(".files")

        def note(path: Path, _: Sequence[Piece]) -> None:
            with listing.open("a") as file:
                file.write(f"{path.name}\n")

        def work() -> None:
            before_each_file(note)
            start(folder, method, changes)

        began = time.perf_counter()
        child = forked(work)
        wait_for_first_manifest(folder, child)
        between = time.perf_counter()
        assert finish(child) == 0
        return cls(folder, tuple(listing.read_text().split()), between - began, time.perf_counter() - between)

    def last_round_before(self, call: int) -> int:
        """The round of the last manifest that is whole when the n-th file is being written."""
        return max((int(name[9:15]) for name in self.files[: call - 1] if name.startswith("manifest-")), default=0)

    def calls(self, inside: bool) -> list[int]:
        """Files to die at: all, or those after which a run goes on from a round inside it."""
        every = range(1, len(self.files) + 1)
        return [call for call in every if not inside or 0 < self.last_round_before(call) < ROUNDS]


def trial(
    folder: Path, method: str, changes: dict[str, Any], chance: random.Random, whole: Whole, point: int, kind: str
) -> dict[str, Any]:
    """One run stopped at one point and resumed. Returns how it was stopped, and the round it went on from."""
    told: dict[str, Any] = {}
    if kind in ("file", "disk"):
        call = chance.choice(whole.calls(inside=point == 0))

        def work() -> None:
            (die_while_writing if kind == "file" else fill_disk)(call)
            start(folder, method, changes)

        child = forked(work)
        told |= {"how": f"while writing file {call}, {whole.files[call - 1]}", "last_round": whole.last_round_before(call)}
    else:
        wait = chance.uniform(0, whole.beginning if kind == "start" else whole.rest)
        child = forked(lambda: start(folder, method, changes))
        if kind == "clock":
            wait_for_first_manifest(folder, child)
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        told |= {"how": f"{wait:.3f} s after the {'start' if kind == 'start' else 'first manifest'}"}
    told["killed"] = finish(child) == (FAILED if kind == "disk" else -signal.SIGKILL)
    if finish(forked(lambda: go_on(folder, method, changes))) != 0:
        raise SystemExit(f"{method}: the run killed {told['how']} could not go on")
    same = (folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    return told | {"kind": kind, "went_on_from": went_on_from(folder), "digest": digest_of(folder), "metrics_equal": same}


def digest_of(folder: Path) -> str:
    snapshot, complaints = RunFolder(folder).checkpoints.read()
    assert snapshot is not None and snapshot.notes["finished"] and not complaints, complaints
    return digest(snapshot)


def main() -> None:
    method, points, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    changes = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in sys.argv[4:])}
    kinds = changes.pop("kinds", KINDS)
    parse(method)
    torch.set_num_threads(1)
    chance = random.Random(f"{method} {seed}")  # methods that write as many files die at different ones
    with tempfile.TemporaryDirectory() as home:
        whole = Whole.held(Path(home) / "whole", method, changes)
        kills = [
            trial(Path(home) / f"cut{point}", method, changes, chance, whole, point, kinds[point % len(kinds)])
            for point in range(points)
        ]
        print(json.dumps({"whole": digest_of(whole.folder), "rounds": ROUNDS, "kills": kills}))


if __name__ == "__main__":
    main()
