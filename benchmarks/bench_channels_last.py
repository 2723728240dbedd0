"""Effect of ``--layout channels_last``: CPU time of a training step with both memory layouts, in alternation.

Run: .venv/bin/python benchmarks/bench_channels_last.py        (two minutes; prints a table)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from works import CLASSES, build_model, chosen
from write_results import with_spread

from polyfed.models.paper_networks import hfedf_cnn

TURNS = 9


@dataclass(frozen=True)
class Case:
    """A network, the images of one batch, and how many steps are timed together."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    size: int
    steps: int


def cases() -> Iterator[Case]:
    """The networks of workloads (a), (b) and (d), and the CNN of hFedF with and without batch norm."""
    for letter, steps in (("a", 20), ("b", 2), ("d", 1)):
        work = chosen(letter, False)
        yield Case(f"({letter})", partial(build_model, work), work.batch, work.size, steps)
    for norm in ("none", "batch"):
        yield Case(f'hfedf_cnn(norm="{norm}")', partial(hfedf_cnn, CLASSES, (3, 32, 32), norm), 64, 32, 2)


def step_seconds(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> float:
    """Return the CPU seconds of one SGD step."""
    began = time.process_time()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        model.zero_grad(set_to_none=True)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return (time.process_time() - began) / steps


def main() -> None:
    torch.set_num_threads(1)
    print("| network | channels first, s a step | channels last, s a step | ratio: median (quartiles) |\n|---|---|---|---|")
    for case in cases():
        model, images = case.make(), torch.rand(case.batch, 3, case.size, case.size)
        layouts = (images, images.contiguous(memory_format=torch.channels_last))
        labels = torch.arange(case.batch) % CLASSES
        turns = [[step_seconds(model, laid, labels, case.steps) for laid in layouts] for _ in range(TURNS + 1)][1:]
        medians = " | ".join(f"{statistics.median(values):.4f}" for values in zip(*turns, strict=True))
        print(f"| {case.name} | {medians} | {with_spread([last / first for first, last in turns])} |", flush=True)


if __name__ == "__main__":
    main()
