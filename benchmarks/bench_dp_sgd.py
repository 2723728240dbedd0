"""Cost of a dp_sgd step compared with a plain one: six_layer_cnn, batch 32, one thread, CPU seconds.

python benchmarks/bench_dp_sgd.py [STEPS]      prints one JSON line; takes about ten seconds on an idle machine
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from polyfed.core.client import Client
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.core.workbench import ClientState
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings

BATCH, SAMPLES = 32, 743
METHODS = ("fedwon", "fedavg + group_norm")


def federation() -> Federation:
    images = torch.randint(0, 255, (SAMPLES, 3, 28, 28), dtype=torch.uint8)
    examples = ArrayExamples(images, torch.arange(SAMPLES) % 10)
    return Federation("made", tuple(map(str, range(10))), (ClientData("a", ("a",), examples, {"a": examples}),))


def seconds_of_a_step(method: str, steps: int) -> float:
    """Return the median over some steps after a warm-up step."""
    experiment = Experiment(Settings(batch_size=BATCH, rounds=20), federation(), method, "six_layer_cnn")
    client = Client(experiment.backend.data["a"], experiment.bench, ClientState(), 1)
    client.receive(experiment.server.outgoing("a"))
    client.model.train()
    client.optimizer = client.make_optimizer()
    x, y = client.data.train.batch(torch.arange(BATCH))
    x = client.bench.preparation.for_training(x)
    taken = []
    for index in range(steps + 1):
        began = time.process_time()
        client.train_on(index, x, y)
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:])


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    found = {}
    for method in METHODS:
        plain, private = seconds_of_a_step(method, steps), seconds_of_a_step(f"{method} + dp_sgd(epsilon=8.0)", steps)
        system = seconds_of_a_step(f'{method} + dp_sgd(epsilon=8.0, noise="system")', steps)
        found[method] = {"plain": plain, "dp_sgd": private, "ratio": private / plain, "ratio, noise of the system": system / plain}
    print(json.dumps({"model": "six_layer_cnn", "batch": BATCH, "threads": 1, "methods": found}))


if __name__ == "__main__":
    main()
