"""Growth of costs with the number of clients, with the model size, and over 200 rounds.

Run: make bench      (or: benchmarks/.venv/bin/python benchmarks/bench_growth.py)

Clients: fedbn with 10, 100, 1,000 and 10,000 clients that all hold local entries, 10 of them in a round. Each count runs in a process of
its own; the timed rounds of all counts are interleaved, a few rounds a turn, in turns that go up and down the counts. What a round
costs is its processor time: seconds on the clock also tell what else the machine does. All clients share one small array, so that
memory shows what polyfed keeps. Growth is that of anonymous memory, from a heap without free pages: rather too much than too little.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
TURNS, ROUNDS_A_TURN = 30, 4


def growth_work(clients: int, quick: bool) -> Work:
    """A workload with this number of clients."""
    model = "small_cnn(width=8)" if quick else "small_cnn(width=64)"
    return Work("e", "growth", model, clients, min(A_ROUND, clients), SAMPLES, BATCH, shared_data=True)


def resident() -> int:
    """The memory of this process after a collection."""
    gc.collect()
    return processes.resident_bytes([os.getpid()])


def anonymous() -> int:
    """Return the anonymous memory after a garbage collection. The kernel decides how much of the libraries is resident."""
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def give_back_free_pages() -> None:
    """Return free memory to the kernel. Otherwise it would be reused first, and growth would look smaller than it is."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def local_bytes(kept: Mapping[str, Any]) -> int:
    """The size of the entries that clients keep."""
    return sum(value.numel() * value.element_size() for one in kept.values() for value in one.entries.values())


def one_count(clients: int, turns: int, quick: bool) -> None:
    """Runs in a separate process: train every client once, measure memory, then run rounds with ten clients on request."""
    from dataclasses import replace

    import torch
    from side_polyfed import settings_for

    from polyfed.runs.experiment import Experiment

    torch.set_num_threads(1)
    work = growth_work(clients, quick)
    data, model = federation(work), build_model(work)
    everybody = Experiment(settings_for(replace(work, a_round=clients), 1, local_steps=1), data, "fedbn", model)
    warmed_up = federation(growth_work(2, quick))
    Experiment(settings_for(growth_work(2, quick), 1, local_steps=1), warmed_up, "fedbn", build_model(work)).train()
    give_back_free_pages()
    before = anonymous()
    everybody.train()
    grown = anonymous() - before
    snapshot = everybody.snapshot()
    print(json.dumps({"grown": grown, "local": local_bytes(snapshot.clients), "resident": resident()}), flush=True)
    sampled = Experiment(settings_for(work, snapshot.round + turns * ROUNDS_A_TURN), data, "fedbn", model)
    sampled.restore(snapshot)
    clock = {"seconds": 0.0, "processor": 0.0}

    def begin() -> None:
        sys.stdin.readline()
        clock.update(seconds=time.perf_counter(), processor=time.process_time())

    def wait(server: Any) -> None:
        if (server.round - snapshot.round) % ROUNDS_A_TURN:
            return
        spent = {"seconds": time.perf_counter() - clock["seconds"], "processor": time.process_time() - clock["processor"]}
        print(json.dumps({name: value / ROUNDS_A_TURN for name, value in spent.items()}), flush=True)
        if server.round < server.rounds:
            begin()

    begin()
    sampled.train([wait])


def by_clients(counts: tuple[int, ...], turns: int, quick: bool, say: Any) -> dict[str, Any]:
    """Run interleaved rounds of ten clients for several federation sizes; the first turn is a warm-up."""
    found: dict[str, Any] = {}
    running: dict[int, subprocess.Popen[str]] = {}
    try:
        for count in counts:
            command = [sys.executable, __file__, "--one-count", str(count), "--repeats", str(turns + 1)] + ["--quick"] * quick
            running[count] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(1, Path(tempfile.gettempdir()))
            )
            found[str(count)] = answer(running[count]) | {"rounds": [], "processor": []}
            say(f"growth: {count} clients prepared: {found[str(count)]}")
        for turn in range(turns + 1):
            for count in counts if turn % 2 else reversed(counts):
                stdin = running[count].stdin
                assert stdin is not None
                print("go", file=stdin, flush=True)
                spent = answer(running[count])
                if turn:
                    found[str(count)]["rounds"].append(spent["seconds"])
                    found[str(count)]["processor"].append(spent["processor"])
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
    """Measure memory over many rounds of fedbn. After all clients have trained, it should not grow."""
    from side_polyfed import settings_for

    from polyfed.runs.experiment import Experiment

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
        turns = 1 if options.quick else max(repeats, TURNS)
        found = by_clients((10, 30) if options.quick else COUNTS, turns, options.quick, report)
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
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
