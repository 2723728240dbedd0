"""Measures what the networks of the papers cost by example and by step, and writes src/polyfed/experiments/speeds.toml.

Run: python benchmarks/experiment_speeds.py        (one thread; three minutes)

Processor time of a training step (forward, backward, SGD) is taken at two batch sizes; the straight line through them gives the cost of
an example and of a step.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from polyfed.models import models

FILE = Path(__file__).parents[1] / "src" / "polyfed" / "experiments" / "speeds.toml"
NETWORKS = {
    "small_cnn": (28, 10),
    "six_layer_cnn": (28, 10),
    "alexnet_fedwon": (128, 10),
    "resnet20": (32, 10),
    "lenet": (32, 10),
    "mobilenet_v2": (32, 10),
    "resnet18": (64, 8),
    "resnet50": (96, 7),
    "densenet121": (96, 2),
    "hfedf_cnn": (32, 7),
}
"""Side of the images, and classes."""
SMALL, LARGE = 4, 32
LEAST_SECONDS = 1.5


def step_seconds(model: nn.Module, side: int, classes: int, batch: int) -> float:
    """Processor time of one training step, the mean over some."""
    x, y = torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    start, count = time.process_time(), 0
    while time.process_time() - start < LEAST_SECONDS or count < 3:
        step()
        count += 1
    return (time.process_time() - start) / count


def main() -> None:
    """Measure every network and rewrite the file below its comment."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = FILE.read_text().split("\n[")[0].rstrip()
    tables = []
    for name, (side, classes) in NETWORKS.items():
        model = models.build(name, classes=classes, input_shape=(3, side, side)).train()
        small, large = (step_seconds(model, side, classes, batch) for batch in (SMALL, LARGE))
        example = max((large - small) / (LARGE - SMALL), 0.0)
        tables.append(f"[{name}]\nexample = {example:.6f}\nstep = {max(small - SMALL * example, 0.0):.6f}\nside = {side}")
        print(re.sub("\n", "  ", tables[-1]), flush=True)
    FILE.write_text("\n\n".join([head, *tables]) + "\n")


if __name__ == "__main__":
    main()
