"""What a round costs beside a hand-written loop of the same work: one process, one thread, interleaved.

Run: .venv/bin/python benchmarks/bench_overhead.py --repeats 5      (one process; bench_speed.py compares with other programs)

Both sides do the same arithmetic on the same batches: copy the model in, shuffle, gather uint8, normalise, forward, backward, SGD step,
average. CPU time is compared as well as wall time, since the machine may be shared. No assertion is timed; results are printed as ratios.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.data.federation import ArrayExamples, ClientData, Federation
from polyfed.experiment import Experiment
from polyfed.models import models
from polyfed.settings import Settings


@dataclass(frozen=True)
class Work:
    """A federation of random arrays and a model."""

    name: str
    model: str
    clients: int
    a_round: int
    samples: int
    batch: int
    size: int = 28

    def federation(self) -> Federation:
        stream = torch.Generator().manual_seed(0)
        made = []
        for index in range(self.clients):
            x = torch.randint(0, 256, (self.samples, 3, self.size, self.size), dtype=torch.uint8, generator=stream)
            y = torch.randint(0, 10, (self.samples,), generator=stream)
            made.append(ClientData(f"c{index:05d}", ("d",), ArrayExamples(x, y), {"d": ArrayExamples(x[:2], y[:2])}))
        return Federation("random", tuple("0123456789"), tuple(made))


WORKS = (
    Work("a: small CNN, 10 of 100 clients, 72 samples, batch 4", "small_cnn(width=64)", 100, 10, 72, 4),
    Work("b: six-layer CNN, 5 clients, 743 samples, batch 32", "six_layer_cnn", 5, 5, 743, 32),
)


def hand_written_round(model: nn.Module, state: dict[str, Tensor], clients: list[ClientData], batch: int) -> dict[str, Tensor]:
    """FedAvg as one would write it in a notebook, with one resident model."""
    total = sum(len(client.train) for client in clients)
    average: dict[str, Tensor] = {}
    for client in clients:
        model.load_state_dict(state)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for chunk in torch.randperm(len(client.train)).split(batch):
            x, y = client.train.batch(chunk)
            x = x.float().div_(255).sub_(0.5).div_(0.5)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        share = len(client.train) / total
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                average[name] = value * share if name not in average else average[name].add_(value, alpha=share)
            else:
                average[name] = value.clone()
    return average


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(work: Work, repeats: int) -> str:
    """Interleave rounds of both, and give the ratios."""
    federation = work.federation()
    torch.manual_seed(0)
    model = models.build(work.model, classes=10, input_shape=(3, work.size, work.size))
    settings = Settings(
        rounds=10**6, batch_size=work.batch, lr=0.01, clients_per_round=work.a_round if work.a_round < work.clients else None
    )
    experiment = Experiment(settings, federation, "fedavg", copy.deepcopy(model))
    state = copy.deepcopy(model.state_dict())
    from polyfed.run import hold_round

    walls, cpus = [], []
    for number in range(1, repeats + 2):
        ours = timed(lambda n=number: hold_round(experiment.method, experiment.server, experiment.delivery, experiment.carry, n))
        chosen = list(federation.clients[: work.a_round])
        theirs = timed(lambda c=chosen: hand_written_round(model, state, c, work.batch))
        if number > 1:
            walls.append(ours[0] / theirs[0])
            cpus.append(ours[1] / theirs[1])
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"| {work.name} | {parameters:,} | {statistics.median(cpus):.3f} ({min(cpus):.3f} to {max(cpus):.3f}) "
        f"| {statistics.median(walls):.3f} ({min(walls):.3f} to {max(walls):.3f}) | {repeats} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="letters of the works to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(
        f"commit {commit or 'none'}, torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}, one thread"
    )
    print("| work | parameters | CPU time, polyfed / hand-written: median (range) | wall time | rounds |\n|---|---|---|---|---|")
    for work in WORKS:
        if not options.only or work.name[0] in options.only:
            print(compare(work, options.repeats), flush=True)


if __name__ == "__main__":
    main()
