"""Cost of a checkpoint after every round: alternating rounds of a 14-million-parameter model with and without.

Run: python benchmarks/bench_checkpoints.py [--method fedavg] [--samples 64] [--turns 5] [--folder DIR]
The first round and the checkpoint at the end are not counted. A ratio is taken turn by turn, then the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from works import WORKS, federation

from polyfed.core.data_types import Federation
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.runs.malloc import keep_freed_pages
from polyfed.settings import Settings

WORK = WORKS["e3"]
NEVER = "1000000"


def seconds_a_round(method: str, data: Federation, every: str, rounds: int, folder: Path) -> tuple[float, float]:
    """Return wall-clock and CPU seconds per round, without the first round."""
    marks: list[tuple[float, float]] = []

    def mark(server: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    settings = Settings(method=method, model=WORK.model, rounds=rounds, batch_size=32, checkpoint_every=every, evaluate_every=0)
    with tempfile.TemporaryDirectory(dir=folder) as home:
        experiment = Experiment(settings, data)
        train = experiment.train
        experiment.train = lambda observers=(): train([*observers, mark])  # type: ignore[method-assign]
        train_run(experiment, RunFolder(Path(home) / "run"))
    (wall, cpu), (last_wall, last_cpu) = marks[1], marks[-1]
    return (last_wall - wall) / (rounds - 1), (last_cpu - cpu) / (rounds - 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--samples", type=int, default=64, help="of each client, in batches of 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; default: where temporary files go")
    told = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()
    data = federation(dataclasses.replace(WORK, samples=told.samples))
    seconds_a_round(told.method, data, NEVER, 2, told.folder)
    found = [
        [seconds_a_round(told.method, data, every, told.rounds, told.folder) for every in (NEVER, "1")] for _ in range(told.turns)
    ]
    for place, what in enumerate(("wall", "CPU")):
        without, each = ([turn[kind][place] for turn in found] for kind in (0, 1))
        ratios = [b / a for a, b in zip(without, each, strict=True)]
        print(
            f"{what} seconds a round: {statistics.median(without):.3f} without checkpoints, {statistics.median(each):.3f} with one "
            f"after each round, ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
