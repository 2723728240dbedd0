"""Time and memory of every analysis of a run with 14 million parameters and five clients: python benchmarks/bench_analyses.py

Images are noise of 64 x 64 pixels: what is measured does not depend on what they show.
"""

from __future__ import annotations

import resource
import tempfile
import time

import torch

import polyfed
from polyfed.analysis.kinds import KINDS

CLIENTS, IMAGES, SIDE = 5, 320, 64


def part(seed: int, count: int) -> polyfed.ArrayExamples:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=stream)
    return polyfed.ArrayExamples(x, torch.arange(count) % 10)


def main() -> None:
    domains = tuple(polyfed.Domain(f"d{i}", part(i, IMAGES), part(100 + i, 100)) for i in range(CLIENTS))
    data = polyfed.DataSet("noise", tuple(map(str, range(10))), domains)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"rounds": 1, "local_steps": 1, "batch_size": 32, "threads": 1}
        result = polyfed.run(data, "fedavg", model="alexnet_fedwon", out=f"{folder}/run", **settings)
        count = sum(p.numel() for p in result.newcomer().parameters())
        started, cpu = time.perf_counter(), time.process_time()
        found = polyfed.analyse(result)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{len(found)} of {len(KINDS)} kinds, {count / 1e6:.1f} M parameters, {CLIENTS} clients: {wall:.0f} s, {cpu:.0f} s of CPU, {peak:.2f} GB"
    )
    for left in found.skipped:
        print(f"{left.kind}: {left.reason}")


if __name__ == "__main__":
    main()
