"""How cost grows: with the number of clients, with the size of the model, and over 200 rounds.

Run: make bench      (or: benchmarks/.venv/bin/python benchmarks/bench_growth.py)

Clients: fedbn with 10, 100, 1,000 and 10,000 clients that all hold local entries, 10 of them in a round. Each count runs in a process of
its own; the timed rounds of all counts are interleaved. All clients share one small array, so that memory shows what polyfed keeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import processes
from contenders import taking_part
from driver import environment, measure
from results import DATA, put
from works import SIZE_WORKS, Work, build_model, chosen, federation

COUNTS = (10, 100, 1_000, 10_000)
A_ROUND, SAMPLES, BATCH = 10, 8, 4
LONG_RUN = 200


def growth_work(clients: int, quick: bool) -> Work:
    """A work in which only the number of clients differs."""
    model = "small_cnn(width=8)" if quick else "small_cnn(width=64)"
    return Work("e", "growth", model, clients, min(A_ROUND, clients), SAMPLES, BATCH, shared_data=True)


def resident() -> int:
    """The memory of this process after a collection."""
    gc.collect()
    return processes.resident_bytes([os.getpid()])


def local_bytes(kept: dict[str, Any]) -> int:
    """The size of the entries that clients keep."""
    return sum(value.numel() * value.element_size() for one in kept.values() for value in one.entries.values())


def one_count(clients: int, rounds: int, quick: bool) -> None:
    """In a process of its own: let every client train once, measure memory, then run rounds of ten when told."""
    from dataclasses import replace

    import torch
    from side_polyfed import settings_for

    from polyfed.experiment import Experiment

    torch.set_num_threads(1)
    work = growth_work(clients, quick)
    data, model = federation(work), build_model(work)
    everybody = Experiment(settings_for(replace(work, a_round=clients), 1, local_steps=1), data, "fedbn", model)
    warmed_up = federation(growth_work(2, quick))
    Experiment(settings_for(growth_work(2, quick), 1, local_steps=1), warmed_up, "fedbn", build_model(work)).train()
    before = resident()
    everybody.train()
    after = resident()
    snapshot = everybody.snapshot()
    print(json.dumps({"grown": after - before, "local": local_bytes(dict(snapshot.clients)), "resident": after}), flush=True)
    sampled = Experiment(settings_for(work, 1 + rounds), data, "fedbn", model)
    sampled.restore(snapshot)
    clock = {"started": 0.0}

    def begin() -> None:
        sys.stdin.readline()
        clock["started"] = time.perf_counter()

    def wait(server: Any) -> None:
        print(json.dumps({"seconds": time.perf_counter() - clock["started"]}), flush=True)
        if server.round < server.rounds:
            begin()

    begin()
    sampled.train([wait])


def by_clients(counts: tuple[int, ...], repeats: int, quick: bool, say: Any) -> dict[str, Any]:
    """Rounds of ten clients with so many in the federation, interleaved."""
    found: dict[str, Any] = {}
    running: dict[int, subprocess.Popen[str]] = {}
    try:
        for count in counts:
            command = [sys.executable, __file__, "--one-count", str(count), "--repeats", str(repeats + 1)] + ["--quick"] * quick
            running[count] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(1, Path(tempfile.gettempdir()))
            )
            found[str(count)] = answer(running[count]) | {"rounds": []}
            say(f"growth: {count} clients prepared: {found[str(count)]}")
        for repeat in range(repeats + 1):
            for count, process in running.items():
                assert process.stdin is not None
                print("go", file=process.stdin, flush=True)
                seconds = answer(process)["seconds"]
                if repeat:
                    found[str(count)]["rounds"].append(seconds)
    finally:
        for process in running.values():
            process.communicate(timeout=60)
    return found


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("A growth measurement ended early; its message is above.")
    found: dict[str, Any] = json.loads(line)
    return found


def long_run(rounds: int, quick: bool) -> dict[str, Any]:
    """Memory over many rounds of fedbn, when every client has been seen: a line through the second half should be flat."""
    from side_polyfed import settings_for

    from polyfed.experiment import Experiment

    work = growth_work(20, quick)
    experiment = Experiment(settings_for(work, rounds), federation(work), "fedbn", build_model(work))
    seen: list[tuple[int, int]] = []

    def look(server: Any) -> None:
        if server.round and server.round % max(1, rounds // 20) == 0:
            seen.append((server.round, resident()))

    experiment.train([look])
    half = [pair for pair in seen if pair[0] >= rounds // 2]
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope
    return {"rounds": rounds, "memory": seen, "bytes_a_round": slope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", default="clients,sizes,rounds", help="parts to measure, with commas")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--one-count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_count:
        one_count(options.one_count, options.repeats, options.quick)
        return
    repeats = 1 if options.quick else options.repeats
    parts = options.parts.split(",")
    if "clients" in parts:
        found = by_clients((10, 30) if options.quick else COUNTS, repeats, options.quick, report)
        put(options.out, "growth", "clients", {"counts": found, "quick": options.quick}, sys.argv)
    if "rounds" in parts:
        put(options.out, "growth", "rounds", long_run(20 if options.quick else LONG_RUN, options.quick), sys.argv)
    if "sizes" in parts:
        for letter in SIZE_WORKS[: 1 if options.quick else None]:
            work = chosen(letter, options.quick)
            measured = measure(letter, taking_part(letter), work.warm_ups, repeats, 1, options.quick, report)
            facts = {"title": work.title, "quick": options.quick, "repeats": repeats, "contenders": measured}
            put(options.out, "sizes", letter, facts | {"parameters": parameters(work)}, sys.argv)


def parameters(work: Work) -> int:
    """The number of parameters of a work's model."""
    return sum(parameter.numel() for parameter in build_model(work).parameters())


def report(line: str) -> None:
    """Progress, for whoever waits."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
