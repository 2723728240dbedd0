"""Kill real processes at seeded instants and let others go on; print one JSON line with the digests.

Run by tests/test_kill.py, and by hand: python tests/kill_harness.py METHOD POINTS SEED [SETTING=VALUE ...]
torch is imported once; every trial is a forked process of its own, killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from polyfed.checkpoint import Checkpoints
from polyfed.experiment import Experiment
from polyfed.folder import RunFolder
from polyfed.method import parse
from polyfed.observers import record, resume
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation
from polyfed.trees import Piece

ROUNDS = 10


def net() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()


def start(folder: Path, method: str, changes: dict[str, Any]) -> None:
    values = {"rounds": ROUNDS, "batch_size": 4, "checkpoint_every": "1", "evaluate_every": 2} | changes
    record(Experiment(Settings(method=method, **values), tiny_federation(), model=net()), RunFolder(folder))


def go_on(folder: Path, method: str, changes: dict[str, Any]) -> None:
    """Resume; a run killed before its first checkpoint or its run.toml starts again, as its user would."""
    if not (folder / "run.toml").exists():
        start(folder, method, changes)
    else:
        resume(folder, data=tiny_federation(), model=net(), notify=lambda _: None)


def die_while_writing(call: int) -> None:
    """Kill this process in the middle of writing its n-th checkpoint file."""
    put, count = Checkpoints._put, 0

    def half(self: Checkpoints, name: str, data: Sequence[Piece]) -> None:
        nonlocal count
        count += 1
        if count == call:
            whole = b"".join(data)
            (self.folder / f"{name}.part").write_bytes(whole[: len(whole) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, data)

    Checkpoints._put = half  # type: ignore[method-assign]


def forked(work: Any) -> int:
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


def finish(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def trial(folder: Path, method: str, changes: dict[str, Any], chance: random.Random, seconds: float, point: int) -> str:
    """One run killed at one instant and resumed. Returns how it was killed."""
    if point % 3 == 2:
        call = chance.randrange(1, 3 * ROUNDS)

        def work() -> None:
            die_while_writing(call)
            start(folder, method, changes)

        finish(forked(work))
        how = f"while writing file {call}"
    else:
        wait = 0.0 if point == 0 else chance.uniform(0, seconds)
        child = forked(lambda: start(folder, method, changes))
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        finish(child)
        how = f"after {wait:.3f} s"
    if not finish(forked(lambda: go_on(folder, method, changes))):
        raise SystemExit(f"{method}: the run killed {how} could not go on")
    return how


def digest_of(folder: Path) -> str:
    from polyfed.checkpoint import digest

    snapshot, complaints = RunFolder(folder).checkpoints.read()
    assert snapshot is not None and snapshot.notes["finished"] and not complaints, complaints
    return digest(snapshot)


def main() -> None:
    method, points, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    changes = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in sys.argv[4:])}
    parse(method)
    torch.set_num_threads(1)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        assert finish(forked(lambda: start(Path(home) / "whole", method, changes)))
        seconds = time.perf_counter() - began
        kills, digests, metrics = [], [], []
        for point in range(points):
            folder = Path(home) / f"cut{point}"
            kills.append(trial(folder, method, changes, chance, seconds, point))
            digests.append(digest_of(folder))
            metrics.append((folder / "metrics.jsonl").read_bytes() == (Path(home) / "whole" / "metrics.jsonl").read_bytes())
        whole = digest_of(Path(home) / "whole")
    print(json.dumps({"whole": whole, "digests": digests, "kills": kills, "metrics_equal": metrics}))


if __name__ == "__main__":
    main()
