"""Where a round spends its time, by torch's profiler, as text in benchmarks/profiles/.

Run: benchmarks/.venv/bin/python benchmarks/profile_round.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS
from side_polyfed import require_own_path, settings_for
from torch.profiler import ProfilerActivity, profile
from turns import CannotTakePart
from works import Work, build_model, chosen, federation
from write_results import PROFILES

PROFILED = (("b", "polyfed"), ("a", "fused"), ("a", "polyfed"), ("d", "polyfed"))
ARITHMETIC = (
    "conv",
    "mkldnn",
    "mm",
    "linear",
    "batch_norm",
    "pool",
    "threshold",
    "relu",
    "clamp_min",
    "bmm",
    "softmax",
    "nll_loss",
)
UPDATES = ("_foreach", "add_", "sgd", "copy_", "lerp", "zero_")
ROWS = 30


def share(events: Any, words: tuple[str, ...]) -> float:
    """The part of all operators' own time that goes to operators whose names hold one of these words."""
    total = sum(event.self_cpu_time_total for event in events)
    return float(sum(event.self_cpu_time_total for event in events if any(word in event.key for word in words)) / total)


def profiled(work: Work, name: str) -> str:
    """Warm up for a round, time one round without the profiler, then profile one."""
    from polyfed.experiment import Experiment

    contender = CONTENDERS[name]
    settings = settings_for(work, 3, contender.threads, **contender.options)
    experiment = Experiment(settings, federation(work), "fedavg", build_model(work))
    require_own_path(experiment, dict(contender.options))
    watcher = profile(activities=[ProfilerActivity.CPU])
    ended: list[float] = []

    def look(server: Any) -> None:
        ended.append(time.perf_counter())
        if server.round == 2:
            watcher.start()
        elif server.round == 3:
            watcher.stop()

    experiment.train([look])
    seconds = ended[2] - ended[1]
    events = [event for event in watcher.key_averages() if event.self_cpu_time_total > 0]
    inside = sum(event.self_cpu_time_total for event in events) / 1e6
    calls = sum(event.count for event in events)
    arithmetic, updates = share(events, ARITHMETIC), share(events, UPDATES)
    summary = (
        f"Work ({work.letter}), {contender.title}: a round took {seconds:.2f} s without the profiler and {inside:.2f} s inside {calls:,} operator calls with it.\n"
        f"Of the operators' own time {arithmetic:.0%} is the network's arithmetic (convolution, linear, norm, pooling, loss), "
        f"{updates:.0%} copies and updates, {1 - arithmetic - updates:.0%} the rest (gathering, autograd, views)."
    )
    table = watcher.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=50)
    return f"{summary}\n\n{table}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="names such as b-polyfed, with commas")
    parser.add_argument("--out", type=Path, default=PROFILES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(exist_ok=True)
    for letter, name in PROFILED:
        if options.only and f"{letter}-{name}" not in options.only.split(","):
            continue
        try:
            text = profiled(chosen(letter, options.quick), name)
        except CannotTakePart as error:
            print(f"{letter}-{name}: {error}")
            continue
        (options.out / f"{letter}-{name}.txt").write_text(text)
        print(text.split("\n\n", 1)[0])


if __name__ == "__main__":
    main()
