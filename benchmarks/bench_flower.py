"""Cost of an exchange over Flower compared with the same exchange in process, for payloads of 1, 44 and 228 MB.

Run: .venv/bin/python benchmarks/bench_flower.py        (needs the flower extra; some ten minutes; writes flower.json and flower.md)

One SuperLink and two SuperNodes on loopback, with TLS and node keys. A round of FedAvg is one exchange: the model goes down to both
nodes, each takes one step on eight small images, the model comes back from both and is averaged. A round lasts from the moment its
losses are written to metrics.jsonl to the moment those of the next are; the file is looked at a hundred times a second, so that nothing
is added to the program that is measured. No checkpoint is written meanwhile. All processes are ended however the program ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))

from processes import PeakMemory  # noqa: E402
from results import put, read  # noqa: E402
from write_flower import DATA, TEXT, document  # noqa: E402

from helpers.flower_harness import Trial  # noqa: E402
from helpers.flower_runs import EXECUTOR, digest_in  # noqa: E402
from polyfed.flower.app import write_app  # noqa: E402
from polyfed.runs.callbacks.callback import Callback, RunState  # noqa: E402
from polyfed.runs.experiment import Experiment  # noqa: E402
from polyfed.runs.lifecycle import train_run  # noqa: E402
from polyfed.settings import Settings  # noqa: E402

MODELS = HERE / "flower_payloads.py"
SIZES = (1, 44, 228)
LISTED = hashlib.sha256(MODELS.read_bytes()).hexdigest()
NODES = ("pen", "photo")
LOOK_EVERY = 0.01
RUN_LIMIT = 300.0
NEVER = "1000000s"
COMMON = Settings(
    data="digits-mini(per_domain=10)",
    unseen=("post", "print", "street"),
    rounds=4,
    batch_size=8,
    local_steps=1,
    checkpoint_every=NEVER,
)


@dataclass(frozen=True)
class Way:
    """How a node runs requests: which process starts its ClientApps, and if a process with data, model and torch is kept."""

    name: str
    executor: Sequence[str]
    resident: bool
    sizes: Sequence[int]
    rounds: int


WAYS = (
    Way("fresh", (), False, (1,), 3),
    Way("resident", (), True, SIZES, 4),
    Way("warm", EXECUTOR, True, SIZES, 4),
)


class RoundClock:
    """Records when the losses of each round appear in a run's metrics."""

    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self.ends: dict[int, float] = {}
        self.seen = 0
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.over.wait(LOOK_EVERY):
            self.look()

    def look(self) -> None:
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size == self.seen:
            return
        now, self.seen = time.monotonic(), size
        for text in self.metrics.read_text().splitlines(keepends=True):
            line = json.loads(text) if text.endswith("\n") else {}
            if line.get("view") == "training":
                self.ends.setdefault(int(line["round"]), now)

    def __enter__(self) -> RoundClock:
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.watcher.join()

    def rounds(self) -> list[float]:
        """Return the seconds of each round after the first, which also builds data and model at the nodes."""
        return differences([self.ends[number] for number in sorted(self.ends)])


def differences(moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def settings_for(size: int, rounds: int) -> Settings:
    return dataclasses.replace(COMMON, model=f"{MODELS.stem}:megabytes_{size}", rounds=rounds)


def in_process(settings: Settings) -> dict[str, Any]:
    """Run the settings in this process."""
    moments: list[float] = []

    class Note(Callback):
        def after_round(self, run: RunState) -> None:
            moments.append(time.monotonic())

    result = train_run(Experiment(settings.trusted()), None, callbacks=[Note()])
    return {"rounds": differences(moments), "digest": result.digest}


def over_flower(trial: Trial, settings: Settings) -> dict[str, Any]:
    """Run the settings over Flower, and measure the peak memory of the SuperLink and its ServerApp."""
    folder = Path(tempfile.mkdtemp(dir=trial.folder))
    write_app(folder / "app", settings, "bench")
    shutil.copyfile(MODELS, folder / "app" / MODELS.name)
    out = folder / "run"
    begin = time.monotonic()
    with RoundClock(out / "metrics.jsonl") as clock, PeakMemory(trial.processes["link"].handle.pid, every=0.5) as memory:
        run = trial.submit(folder / "app", "--run-config", f'min-nodes={len(NODES)} out="{out}"')
        ended = trial.ended(run, RUN_LIMIT)
    if ended.status != "finished:completed":
        raise SystemExit(f"The run ended as {ended.status} ({ended.details}):\n{ended.log[-3000:]}")
    whole = time.monotonic() - begin
    shutil.rmtree(out)
    return {"rounds": clock.rounds(), "digest": digest_in(ended.log), "whole_run": whole, "server_memory": memory.most}


@contextmanager
def federation(way: Way) -> Iterator[Trial]:
    """A SuperLink and its nodes, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="polyfed-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        configs = [
            f'domain="{node}" state="{folder / "state" / node}" resident={"true" if way.resident else "false"} code="{LISTED}"'
            for node in NODES
        ]
        with Trial(folder, configs, executor=way.executor) as trial:
            yield trial


def measure(way: Way, sizes: Sequence[int], out: Path) -> None:
    """Measure a variant for some sizes, and store each result immediately."""
    with federation(way) as trial:
        for size in sizes:
            settings = settings_for(size, way.rounds)
            facts = over_flower(trial, settings)
            beside = in_process(settings)
            if facts.pop("digest") != beside.pop("digest"):
                raise SystemExit(f"{way.name}, {size} MB: the weights over Flower are not those in process.")
            facts |= {"way": way.name, "megabytes": size, "in_process": beside["rounds"], "nodes": len(NODES)}
            put(out, "flower", f"{way.name}-{size}", facts, sys.argv)
            print(f"{way.name}, {size} MB: {', '.join(f'{value:.2f}' for value in facts['rounds'])} s a round", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS], choices=[way.name for way in WAYS])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, choices=SIZES, help="megabytes")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    # Raise on SIGTERM, so that the with blocks end the processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for way in WAYS:
        sizes = [size for size in way.sizes if size in options.sizes]
        if way.name in options.ways and sizes:
            measure(way, sizes, options.out)
    text = options.out.with_suffix(TEXT.suffix)
    text.write_text(document(read(options.out)))


if __name__ == "__main__":
    main()
