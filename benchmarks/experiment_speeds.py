"""Measures what the networks of the papers cost by example and by step, and writes src/polyfed/papers/speeds.toml.

Run: python benchmarks/experiment_speeds.py [NETWORK...]        (one thread; three minutes; other networks are unchanged)

Processor time of a training step (forward, backward, SGD) is taken at two batch sizes; the straight line through them gives the cost of
an example and of a step.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from polyfed.models import models

FILE = Path(__file__).parents[1] / "src" / "polyfed" / "papers" / "speeds.toml"
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
    "deeplabv3plus": (128, 11),
    "efficientnet_lite0": (96, 7),
}
"""Side of the images, and classes."""
SMALL, LARGE = 4, 32
MIN_SECONDS = 1.5


def step_seconds(model: nn.Module, side: int, batch: int) -> float:
    """Processor time of one training step, the mean over some."""
    x = torch.randn(batch, 3, side, side)
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    start, count = time.process_time(), 0
    while time.process_time() - start < MIN_SECONDS or count < 3:
        step()
        count += 1
    return (time.process_time() - start) / count


def main() -> None:
    """Measure every network and rewrite the file below its comment."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head, *before = FILE.read_text().split("\n[")
    known = {text.partition("]")[0]: f"[{text.rstrip()}" for text in before}
    for name in sys.argv[1:] or NETWORKS:
        side, classes = NETWORKS[name]
        model = models.build(name, classes=classes, input_shape=(3, side, side)).train()
        small, large = (step_seconds(model, side, batch) for batch in (SMALL, LARGE))
        example = max((large - small) / (LARGE - SMALL), 0.0)
        known[name] = f"[{name}]\nexample = {example:.6f}\nstep = {max(small - SMALL * example, 0.0):.6f}\nside = {side}"
        print(re.sub("\n", "  ", known[name]), flush=True)
    FILE.write_text("\n\n".join([head.rstrip(), *known.values()]) + "\n")


if __name__ == "__main__":
    main()
