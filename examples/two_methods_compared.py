"""Compare two methods over seeds in Python; `polyfed compare` does the same and prints a table."""

from __future__ import annotations

from statistics import mean, stdev

import polyfed

DATA = "digits-mini(per_domain=100)"
METHODS = ("fedavg", "fedbn")
SEEDS = (0, 1)

if __name__ == "__main__":
    for method in METHODS:
        runs = [polyfed.run(DATA, method=method, rounds=4, lr=0.1, batch_size=16, seed=seed) for seed in SEEDS]
        means = [run.accuracy["mean"] for run in runs]
        worst = mean(run.accuracy["worst"] for run in runs)
        sent = runs[0].summary()["bytes_up"] / 1e6
        print(f"{method:8} mean {mean(means):.3f} ± {stdev(means):.3f}  worst domain {worst:.3f}  {sent:.1f} MB uploaded")
