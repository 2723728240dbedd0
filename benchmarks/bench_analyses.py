"""Time and memory of every analysis of a run with 18 million parameters and five clients: python benchmarks/bench_analyses.py

Another model: python benchmarks/bench_analyses.py MODEL SIDE (alexnet_fedwon 64 has 57 million parameters).
Images are noise of SIDE x SIDE pixels: what is measured does not depend on what they show. Ten steps of local training at each client
are taken once, for the first kind that needs them. Memory is the peak of the process until then, with the run itself.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time

import torch

import polyfed
from polyfed.studies.analyse.analyse import analyse_runs
from polyfed.studies.analyse.kinds import KINDS

CLIENTS, IMAGES = 5, 320


def part(seed: int, count: int, side: int) -> polyfed.ArrayExamples:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=stream)
    return polyfed.ArrayExamples(x, torch.arange(count) % 10)


class Clock:
    """Prints the duration of each step when the next one starts."""

    def __init__(self) -> None:
        self.step, self.wall, self.cpu = "", time.perf_counter(), time.process_time()

    def begin(self, step: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self.step:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"{self.step:32} {cpu - self.cpu:6.1f} s of CPU {wall - self.wall:6.1f} s  peak {peak:.2f} GB", flush=True)
        self.step, self.wall, self.cpu = step, wall, cpu


def main(model: str = "six_layer_cnn", side: str = "32") -> None:
    domains = tuple(polyfed.Domain(f"d{i}", part(i, IMAGES, int(side)), part(100 + i, 100, int(side))) for i in range(CLIENTS))
    data = polyfed.DataSet("noise", tuple(map(str, range(10))), domains)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"rounds": 1, "local_steps": 1, "batch_size": 32, "threads": 1}
        clock.begin("the run")
        result = polyfed.run(data, "fedavg", model=model, out=f"{folder}/run", **settings)
        count = sum(p.numel() for p in result.newcomer().parameters())
        clock.begin("")
        cpu, wall = clock.cpu, clock.wall
        found = analyse_runs([result], begin=clock.begin)
        clock.begin("")
    cpu, wall = clock.cpu - cpu, clock.wall - wall
    print(
        f"{len(found)} of {len(KINDS)} kinds, {count / 1e6:.1f} M parameters, {CLIENTS} clients: {cpu:.0f} s of CPU, {wall:.0f} s"
    )
    for left in found.skipped:
        print(f"{left.kind}: {left.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
