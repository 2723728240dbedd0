"""Cost of evaluating 10,000 clients: one by one, in one pass if all models are equal, and with a sample if they differ.

Run: python benchmarks/bench_scoring.py [--clients 10000] [--tests 8] [--turns 3]
Every client has separate test images. One by one, only a tenth of the clients is evaluated, to save minutes. Costs are
CPU seconds per client; the variants alternate, and the result is the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from works import CLASSES, client_name

from polyfed.core import evaluation
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.models import models
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings

SIZE, TRAINING, MODEL = 16, 4, "small_cnn(width=16)"


def federation(clients: int, tests: int) -> Federation:
    """Build clients with random test images."""
    stream = torch.Generator().manual_seed(0)

    def examples(count: int) -> ArrayExamples:
        x = torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=stream)
        return ArrayExamples(x, torch.randint(0, CLASSES, (count,), generator=stream))

    train = examples(TRAINING)
    made = tuple(ClientData(client_name(index), ("d",), train, {"d": examples(tests)}) for index in range(clients))
    return Federation("scoring", tuple(map(str, range(CLASSES))), made)


def built(method: str, data: Federation, sample: int = 0) -> Experiment:
    """A run that has trained one round."""
    torch.manual_seed(0)
    model = models.build(MODEL, classes=CLASSES, input_shape=(3, SIZE, SIZE))
    experiment = Experiment(
        Settings(rounds=1, clients_per_round=10, batch_size=TRAINING, evaluate_clients=sample), data, method, model
    )
    experiment.train()
    return experiment


def cost(experiment: Experiment, together: bool = True) -> float:
    """Return the CPU seconds of one evaluation per client."""
    before, are_equal = time.process_time(), evaluation.models_are_equal
    if not together:
        evaluation.models_are_equal = lambda method, plan: False
    try:
        experiment.evaluate()
    finally:
        evaluation.models_are_equal = are_equal
    return (time.process_time() - before) / len(experiment.federation.clients)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=8, help="test images of a client")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole, tenth = federation(options.clients, options.tests), federation(max(1, options.clients // 10), options.tests)
    equal, few_equal, own, few_own = (
        built("fedavg", whole),
        built("fedavg", tenth),
        built("fedbn", whole, Settings().evaluate_clients),
        built("fedbn", tenth),
    )
    ways: dict[str, Callable[[], float]] = {
        "fedavg, one by one": lambda: cost(few_equal, together=False),
        "fedavg, one pass": lambda: cost(equal),
        "fedbn, one by one": lambda: cost(few_own, together=False),
        f"fedbn, {Settings().evaluate_clients} drawn": lambda: cost(own),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, measure in ways.items():
            found[name].append(measure())
    print(f"{options.clients} clients with {options.tests} test images each, {MODEL}, CPU time, median of {options.turns} turns")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"  {name:<20} {1000 * median:6.3f} ms a client, {median * options.clients:6.1f} s for all")
    names = list(found)
    for before, after in ((names[0], names[1]), (names[2], names[3])):
        ratios = [a / b for a, b in zip(found[before], found[after], strict=True)]
        print(f"{after}: {statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
