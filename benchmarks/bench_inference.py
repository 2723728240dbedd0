"""Inference cost of norms: FedWon, batch norm, group norm and layer norm, as trained and folded, in PyTorch and onnxruntime.

Run: python benchmarks/bench_inference.py [--models "resnet20; small_cnn"] [--size 32] [--batch 1] [--turns 40]
Networks have random weights and statistics, which do not change the work. Costs are CPU seconds per pass on one thread. Ways
take turns; a ratio to batch norm folded, which is the network with plain convolutions and nothing else, is taken turn by turn, then
the median. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.core.entries import batch_norms_of
from polyfed.models.layers.folding import fold_for_prediction
from polyfed.runs.experiment import Experiment
from polyfed.runs.export import write_onnx
from polyfed.settings import Settings

METHODS = {"batch norm": "fedavg", "FedWon": "fedwon", "group norm": "fedavg + group_norm", "layer norm": "fedavg + layer_norm"}
REFERENCE = "batch norm, folded"


def federation(size: int) -> Federation:
    """One client with a few random images: enough to build a model for."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 3, size, size), dtype=torch.uint8, generator=stream)
    examples = ArrayExamples(x, torch.arange(8) % 10)
    return Federation("random", tuple(map(str, range(10))), (ClientData("a", ("a",), examples, {"a": examples}),))


def network(text: str, method: str, size: int) -> nn.Module:
    """The model after the method's surgery, with random statistics."""
    model = Experiment(Settings(method=method, model=text, rounds=1, batch_size=4), federation(size)).bench.model.eval()
    for norm in batch_norms_of(model):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 2)
    return model.requires_grad_(False)


def ways(text: str, size: int, folder: Path, images: Tensor) -> dict[str, dict[str, Callable[[Tensor], Tensor]]]:
    """Every network by its name, run by PyTorch and by onnxruntime."""
    found = {}
    for name, method in METHODS.items():
        trained = network(text, method, size)
        for title, model in ((name, trained), (f"{name}, folded", fold_for_prediction(trained).model)):
            if title.endswith("folded") and method not in ("fedavg", "fedwon"):
                continue
            found[title] = {"PyTorch": model, "onnxruntime": write_onnx(model, images, folder / f"{len(found)}.onnx", {})}
    return found


def measured(
    found: dict[str, dict[str, Callable[[Tensor], Tensor]]], runtime: str, images: Tensor, turns: int
) -> dict[str, list[float]]:
    """Return the CPU seconds per pass, by network, in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(turns + 2):
        for name, by_runtime in found.items():
            start = time.process_time()
            for _ in range(5):
                by_runtime[runtime](images)
            if turn >= 2:
                seconds[name].append((time.process_time() - start) / 5)
    return seconds


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    read.add_argument("--models", default="resnet20; small_cnn")
    read.add_argument("--size", type=int, default=32)
    read.add_argument("--batch", type=int, default=1)
    read.add_argument("--turns", type=int, default=40)
    given = read.parse_args()
    torch.set_num_threads(1)
    images = torch.randn(max(given.batch, 2), 3, given.size, given.size)
    print("| network | norm | PyTorch | ms | onnxruntime | ms |\n| --- | --- | --- | --- | --- | --- |")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for text in (model.strip() for model in given.models.split(";")):
            found = ways(text, given.size, Path(folder), images)
            by_runtime = {name: measured(found, name, images[: given.batch], given.turns) for name in ("PyTorch", "onnxruntime")}
            for name in found:
                cells = []
                for seconds in by_runtime.values():
                    ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds[REFERENCE], strict=True)]
                    cells += [f"{statistics.median(ratios):.2f}", f"{1000 * statistics.median(seconds[name]):.2f}"]
                print(f"| {text} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
