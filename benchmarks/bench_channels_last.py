"""Does channels-last make a training step faster? Processor time of a step with tensors laid out either way, turn by turn.

Run: .venv/bin/python benchmarks/bench_channels_last.py        (two minutes; prints a table)
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from works import CLASSES, build_model, chosen
from write_results import with_spread

WORKS = ("a", "b", "d")
TURNS, STEPS = 9, {"a": 20, "b": 2, "d": 1}


def step_seconds(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> float:
    """Processor seconds of one step of SGD."""
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
    print("| work | contiguous, s a step | channels-last, s a step | ratio: median (quartiles) |\n|---|---|---|---|")
    for letter in WORKS:
        work = chosen(letter, False)
        layouts = {}
        for name, layout in (("contiguous", torch.contiguous_format), ("channels-last", torch.channels_last)):
            images = torch.rand(work.batch, 3, work.size, work.size).contiguous(memory_format=layout)
            layouts[name] = (build_model(work).to(memory_format=layout), images)
        labels = torch.arange(work.batch) % CLASSES
        seconds: dict[str, list[float]] = {name: [] for name in layouts}
        for turn in range(TURNS + 1):
            for name, (model, images) in layouts.items():
                value = step_seconds(model, images, labels, STEPS[letter])
                if turn:
                    seconds[name].append(value)
        ratios = [last / first for first, last in zip(*seconds.values(), strict=True)]
        medians = " | ".join(f"{statistics.median(values):.4f}" for values in seconds.values())
        print(f"| ({letter}) | {medians} | {with_spread(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
