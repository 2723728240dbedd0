"""A round of 100 clients on Flower's simulation runtime (``--backend flower``), compared with the same round in process, in alternation.

Run: .venv/bin/python benchmarks/bench_flower_simulation.py     (needs the flower extra; some minutes; adds to flower.json, writes flower.md)

FedAvg; each client takes steps on its own images. In process is ``--backend process`` with one worker. The first round of each run is left
out: it builds data and model, and starts Ray. The final weights must be bit-identical.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from bench_flower import NEVER, differences
from results import put, read
from write_flower import DATA, TEXT, document

from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings

BACKENDS = ("process", "flower")


def run(settings: Settings) -> tuple[list[float], str]:
    """Seconds of each round after the first, and the digest."""
    moments: list[float] = []

    class Note(Callback):
        def after_round(self, run: RunState) -> None:
            moments.append(time.monotonic())

    experiment = Experiment(settings)
    try:
        digest = train_run(experiment, None, callbacks=[Note()]).digest
    finally:
        experiment.backend.close()
    return differences(moments), digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a run; the first does not count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    settings = Settings(
        data="digits-mini",
        partition=f"domain_even(clients={options.clients // 5})",
        unseen=(),
        method=options.method,
        model=options.model,
        rounds=options.rounds,
        local_steps=options.steps,
        batch_size=16,
        checkpoint_every=NEVER,
    )
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    digests = set()
    for _ in range(options.turns):
        for name in BACKENDS:
            found, digest = run(dataclasses.replace(settings, backend=name))
            seconds[name] += found
            digests.add(digest)
            print(f"{name}: {', '.join(f'{value:.2f}' for value in found)} s a round", flush=True)
    if len(digests) != 1:
        raise SystemExit("The weights on Flower's simulation are not those in process.")
    facts: dict[str, Any] = {
        "clients": options.clients,
        "method": options.method,
        "model": options.model,
        "steps": options.steps,
        "rounds": seconds,
    }
    put(options.out, "simulation", f"{options.clients}-{options.method}-{options.model}", facts, sys.argv)
    options.out.with_suffix(TEXT.suffix).write_text(document(read(options.out)))


if __name__ == "__main__":
    main()
