"""A long run with 10,000 clients, 50 per round, worker processes and checkpoints. Memory, files and seconds per round must not grow.

Run: python benchmarks/soak.py RUN [--rounds 5000] [--clients 10000] [--a-round 50] [--workers 2] [--checkpoint-every 60s]
The same command resumes a stopped or killed run. Measurements are written to RUN.soak.jsonl, with one line every ``--look-every``
rounds; at the end, the quarters of the run are compared. Every client has local layers (fedbn), so memory and files grow until all
clients have trained once, which takes about 1,000 rounds. The exit code is 1 if memory or open files grow later, or if there are more
files than two checkpoints and an unfinished one have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes
import torch
from works import CLASSES, client_name

from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.malloc import keep_freed_pages
from polyfed.settings import Settings
from polyfed.testing import TinyNet

SAMPLES, SIZE = 4, 8
MAX_GROWTH = 1.05
"""Allowed growth of memory from the second to the last quarter, after all clients have trained."""
FILES_OF_A_CLIENT, FILES_OF_THE_RUN = 3, 20
"""Two checkpoints are kept and a third may be half written; how many clients changed between them depends on the speed of the machine."""


def federation(clients: int) -> Federation:
    """Build clients that share a few random images."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SAMPLES, 3, SIZE, SIZE), dtype=torch.uint8, generator=stream)
    same = ArrayExamples(x, torch.randint(0, CLASSES, (SAMPLES,), generator=stream))
    made = tuple(ClientData(client_name(index), ("d",), same, {"d": same}) for index in range(clients))
    return Federation("soak", tuple(map(str, range(CLASSES))), made)


def net() -> TinyNet:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    return TinyNet(CLASSES)


class Looker(Callback):
    """Writes measurements at intervals."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.file = measurements_of(folder)
        self.marks: tuple[int, float, float] | None = None

    def after_round(self, run: RunState) -> None:
        if run.round % self.every:
            return
        own = processes.tree(os.getpid())
        now = run.round, time.perf_counter(), processes.processor_seconds(own)
        if self.marks is not None:
            rounds, seconds, processor = (after - before for after, before in zip(now, self.marks, strict=True))
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            checkpoint = [path for path in files if path.parent != self.folder]
            found = {
                "round": run.round,
                "seconds": seconds / rounds,
                "processor": processor / rounds,
                "memory": anonymous_bytes(os.getpid()),
                "memory_of_all": processes.resident_bytes(own),
                "open_files": len(os.listdir("/proc/self/fd")),
                "files": len(files),
                "checkpoint_bytes": sum(size_of(path) for path in checkpoint),
            }
            with self.file.open("a") as file:
                file.write(json.dumps(found) + "\n")
        self.marks = now

    def message(self, text: str) -> None:
        print(text)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it has just been replaced."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measurements_of(folder: Path) -> Path:
    """Return the measurement file of a run."""
    return folder.with_name(f"{folder.name}.soak.jsonl")


def train(folder: Path, options: argparse.Namespace) -> None:
    """Start or resume the run."""
    look = Looker(folder, options.look_every)
    data = federation(options.clients)
    if (folder / "run.toml").exists():
        resume(folder, data=data, how=Reopening(model=net()), callbacks=[look])
        return
    settings = Settings(
        method=options.method,
        rounds=options.rounds,
        clients_per_round=options.a_round,
        batch_size=SAMPLES,
        workers=str(options.workers),
        checkpoint_every=options.checkpoint_every,
    )
    train_run(Experiment(settings, data, model=net()), RunFolder(folder), [look])


def quarters(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Return the median measurements of each quarter. For repeated rounds, the last one counts."""
    lines = {line["round"]: line for line in map(json.loads, measurements_of(folder).read_text().splitlines())}
    found = []
    for quarter in range(4):
        those = [line for number, line in lines.items() if quarter * rounds < 4 * number <= (quarter + 1) * rounds]
        if not those:
            raise SystemExit(
                f"No measurement in quarter {quarter + 1} of {rounds} rounds. Hold more rounds, or look more often (--look-every)."
            )
        names: Sequence[str] = [name for name in those[0] if name != "round"]
        found.append(
            {"looks": len(those), "max_files": max(line["files"] for line in those)}
            | {name: statistics.median(line[name] for line in those) for name in names}
        )
    return found


def verdict(found: Sequence[dict[str, float]], clients: int) -> list[str]:
    """Return what grew from the second quarter to the last one, and exceeded file limits."""
    second, last = found[1], found[3]
    grown = [
        f"{name} grew from {second[name]:,.0f} to {last[name]:,.0f}"
        for name in ("memory", "open_files")
        if last[name] > MAX_GROWTH * second[name]
    ]
    most = max(one["max_files"] for one in found)
    if most > FILES_OF_A_CLIENT * clients + FILES_OF_THE_RUN:
        grown.append(f"there were {most:,.0f} files, more than {FILES_OF_A_CLIENT} a client")
    return grown


def table(found: Sequence[dict[str, float]]) -> str:
    """Format the quarters as a table."""
    rows = [("", *(f"quarter {number}" for number in range(1, 5)))]
    rows.append(("seconds a round", *(f"{one['seconds']:.3f}" for one in found)))
    rows.append(("CPU seconds per round", *(f"{one['processor']:.3f}" for one in found)))
    rows.append(("memory, MB", *(f"{one['memory'] / 1e6:.1f}" for one in found)))
    rows.append(("memory with workers, MB", *(f"{one['memory_of_all'] / 1e6:.1f}" for one in found)))
    rows.append(("open files", *(f"{one['open_files']:.0f}" for one in found)))
    rows.append(("files of the run", *(f"{one['files']:.0f}" for one in found)))
    rows.append(("most files of the run", *(f"{one['max_files']:.0f}" for one in found)))
    rows.append(("checkpoints, MB", *(f"{one['checkpoint_bytes'] / 1e6:.2f}" for one in found)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the quarters, and report growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--a-round", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="fedbn")
    parser.add_argument("--checkpoint-every", default="60s")
    parser.add_argument("--look-every", type=int, default=10)
    parser.add_argument("--compare-only", action="store_true", help="train nothing; compare the quarters of the rounds held so far")
    options = parser.parse_args(arguments)
    keep_freed_pages()
    torch.set_num_threads(1)
    if not options.compare_only:
        train(options.run, options)
    last = options.rounds
    if options.compare_only:
        last = max(json.loads(line)["round"] for line in measurements_of(options.run).read_text().splitlines())
    found: list[dict[str, Any]] = quarters(options.run, last)
    print(f"{last} rounds, {options.clients} clients, {options.a_round} a round, {options.workers} workers, {options.method}")
    print(table(found))
    grown = verdict(found, options.clients)
    print("; ".join(grown) if grown else f"Memory and open files are flat, files of the run within {FILES_OF_A_CLIENT} a client.")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
