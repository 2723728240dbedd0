"""A round over Flower compared with plain Flower's app, in one run: many small tensors (ResNet-20) and few large ones (57 M parameters).

Run: .venv/bin/python benchmarks/bench_flower_peer.py     (needs the flower extra; some fifteen minutes; adds to flower.json, writes flower.md)

Each side has a SuperLink and three SuperNodes on loopback, with TLS and node keys: plain Flower's app (``plain_flower.py``), polyfed on
Flower's own SuperNodes, and polyfed on ``polyfed.flower.supernode`` with the warm executor. Sides take turns, so that other work on the
machine meets all of them. Plain Flower's app takes one step of eight small images at each node, as polyfed does, and evaluates nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from bench_flower import COMMON, HERE, LISTED, MODELS, RUN_LIMIT, RoundClock, differences, in_process
from processes import ProcessorTime
from results import put, read
from write_flower import DATA, TEXT, document

sys.path.append(str(HERE.parent / "tests"))

from helpers.flower_harness import Trial
from helpers.flower_runs import EXECUTOR, SUPERNODE, digest_in
from polyfed.flower.app import write_app
from polyfed.settings import Settings

PLAIN_APP = HERE / "plain_flower.py"
NODES = ("pen", "photo", "street")
PAYLOADS = {
    "resnet_20": "ResNet-20, 116 tensors, 1.1 MB",
    "megabytes_44": "11 M parameters in 4 tensors, 44 MB",
    "megabytes_228": "57 M parameters in 4 tensors, 228 MB",
}
AS_INSTALLED = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}
"""Flower's default. Tests poll twenty times as often, which costs plain Flower CPU time for one additional SuperExec per node."""
SETTINGS = dataclasses.replace(COMMON, unseen=("post", "print"))


@dataclass(frozen=True)
class Side:
    """A federation: the program of its nodes, and if it runs plain Flower's app."""

    name: str
    plain: bool = False
    supernode: Sequence[str] = ("flower-supernode",)
    executor: Sequence[str] = ()


SIDES = (Side("plain", plain=True), Side("packed"), Side("polyfed", supernode=SUPERNODE, executor=EXECUTOR))


def settings_for(payload: str, rounds: int) -> Settings:
    return dataclasses.replace(SETTINGS, model=f"{MODELS.stem}:{payload}", rounds=rounds)


def plain_run(trial: Trial, payload: str, rounds: int) -> list[float]:
    """Return the end of each round of plain Flower's app."""
    folder = Path(tempfile.mkdtemp(dir=trial.folder))
    app, ends = folder / "app", folder / "ends.txt"
    app.mkdir()
    for file in (PLAIN_APP, MODELS):
        shutil.copyfile(file, app / file.name)
    config = {"model": payload, "rounds": rounds, "nodes": len(NODES), "ends": str(ends)}
    flwr = {
        "publisher": "bench",
        "components": {"serverapp": "plain_flower:server", "clientapp": "plain_flower:client"},
        "config": config,
    }
    project = {"name": "plain", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []}
    (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": flwr}}}))
    finished(trial, app)
    # The first line is before the first round.
    return [float(line) for line in ends.read_text().split()][1:]


def polyfed_run(trial: Trial, payload: str, rounds: int, digest: str) -> list[float]:
    """Return the end of each round of polyfed, whose weights must equal those of the run in process."""
    folder = Path(tempfile.mkdtemp(dir=trial.folder))
    write_app(folder / "app", settings_for(payload, rounds), "bench")
    shutil.copyfile(MODELS, folder / "app" / MODELS.name)
    out = folder / "run"
    with RoundClock(out / "metrics.jsonl") as clock:
        log = finished(trial, folder / "app", "--run-config", f'min-nodes={len(NODES)} out="{out}"')
    if digest_in(log) != digest:
        raise SystemExit(f"{payload}: the weights over Flower are not those in process.")
    shutil.rmtree(out)
    return [clock.ends[number] for number in sorted(clock.ends)]


def finished(trial: Trial, app: Path, *words: str) -> str:
    """Run an app to its end and return its log."""
    ended = trial.ended(trial.submit(app, *words), 3 * RUN_LIMIT)
    if ended.status != "finished:completed":
        raise SystemExit(f"The run ended as {ended.status} ({ended.details}):\n{ended.log[-3000:]}")
    return ended.log


@contextlib.contextmanager
def federation(side: Side) -> Iterator[Trial]:
    """The federation of a side, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="polyfed-bench-", ignore_cleanup_errors=True) as name:
        configs = [f'domain="{node}" state="{Path(name) / "state" / node}" code="{LISTED}"' for node in NODES]
        with Trial(Path(name), configs, AS_INSTALLED, executor=side.executor, supernode=side.supernode) as trial:
            yield trial


def measure(payload: str, sides: Sequence[Side], rounds: int, turns: int, out: Path) -> None:
    """Measure one payload on all sides in alternation, and store the results after each turn."""
    digest = in_process(settings_for(payload, rounds))["digest"]
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    processor: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(turns):
        for side in sides:
            begin = time.monotonic()
            with federation(side) as trial, ProcessorTime(trial.mark) as used:
                ends = plain_run(trial, payload, rounds) if side.plain else polyfed_run(trial, payload, rounds, digest)
            # The first round also builds data and model, and does not count.
            seconds[side.name] += (lasted := differences(ends))
            processor[side.name] += (cost := differences([used.at(moment) for moment in ends]))
            found = ", ".join(f"{value:.2f} s ({work:.1f} s of processor)" for value, work in zip(lasted, cost, strict=True))
            print(f"{payload}, {side.name}: {found} a round, {time.monotonic() - begin:.0f} s in all", flush=True)
        facts: dict[str, Any] = {"payload": payload, "title": PAYLOADS[payload], "nodes": len(NODES)}
        facts |= {"rounds": dict(seconds), "processor": dict(processor)}
        put(out, "peer", payload, facts, sys.argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", nargs="+", default=list(PAYLOADS), choices=list(PAYLOADS))
    parser.add_argument("--sides", nargs="+", default=[side.name for side in SIDES], choices=[side.name for side in SIDES])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a run; the first does not count")
    parser.add_argument("--turns", type=int, default=2, help="runs on each side")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    # Raise on SIGTERM, so that the with blocks end the processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sides = {side.name: side for side in SIDES}
    for payload in options.payloads:
        measure(payload, [sides[name] for name in options.sides], options.rounds, options.turns, options.out)
    options.out.with_suffix(TEXT.suffix).write_text(document(read(options.out)))


if __name__ == "__main__":
    main()
