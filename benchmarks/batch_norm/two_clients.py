"""Two clients that every library trains: their images, their model, and notes of the model before and after each training step.

The model takes the notes itself, in whatever process a library trains it. A library is not asked what it does: what a client begins
a round with is compared with what the clients ended the round before with (``findings.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

ROUNDS = 2
BATCH = 10
LEARNING_RATE = 0.1
SAMPLES = {1: 10, 2: 50}
"""Unequal, so that a mean weighted by samples differs from one of equal clients; the first has fewer batches, so its counter is not the largest."""
LIGHT = {1: 2.0, 2: -2.0}
"""The mean of a client's pixels: the model tells by it whose batch it sees."""
NOTES = "POLYFED_BATCH_NORM_NOTES"
"""The variable of the environment that holds the folder of the notes."""


def images(client: int) -> tuple[Tensor, Tensor]:
    """A client's images and labels."""
    random = torch.Generator().manual_seed(client)
    x = torch.randn(SAMPLES[client], 1, 6, 6, generator=random) + LIGHT[client]
    return x, torch.arange(SAMPLES[client]) % 2


class Net(nn.Module):
    """A convolution, batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv2d(1, 3, 3, bias=False)  # batch norm would take a bias away again
            self.norm = nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; in training, notes are taken."""
        client = whose(x)
        if self.training and client is not None:
            note(client, self)
            at_work.append((client, self))
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def whose(batch: Tensor) -> int | None:
    """Return the client of these images; None for images with which a library tries the model."""
    light = float(batch.mean())
    return 1 if light > 1 else 2 if light < -1 else None


at_work: list[tuple[int, Net]] = []
"""The client whose step is not over yet."""


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Take a note when a client's step is over; a step of the server follows no batch."""
    while at_work:
        note(*at_work.pop())


watching = register_optimizer_step_post_hook(after_step)


def note(who: int | str, model: nn.Module) -> None:
    """Add the state of a model to the notes."""
    write(who, {name: value.tolist() for name, value in model.state_dict().items()})


def write(who: int | str, state: Mapping[str, Any]) -> None:
    """Add a state to the notes; ``who`` is a client, or ``server`` for the model that training ends with."""
    with (Path(os.environ[NOTES]) / f"{who}.jsonl").open("a") as file:
        file.write(json.dumps(state) + "\n")


def train(model: nn.Module, client: int) -> int:
    """One epoch, for libraries that leave the loop to their users; returns the number of samples."""
    x, y = images(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for start in range(0, len(y), BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    return len(y)
