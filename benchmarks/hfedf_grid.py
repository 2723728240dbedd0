"""hFedF on PACS: head initialisation x server optimizer, selected on validation images of the source domains only.

python benchmarks/hfedf_grid.py DATA_ROOT [--out DIR] [--rounds 60] [--seeds 1] [--targets photo sketch] [--estimate] [--test]

Every cell trains with seed 0 (or several seeds) and each target held out, then the best two with one seed more. Every trial is a run folder; run the same command
again to resume. Test data cannot be read. grid.json has the validation score of each run and, for each round, the spread of clients'
models; grid.md is the table. --test then scores the chosen cell, the default hFedF and FedAvg on the held-out domain.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import polyfed
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import Settings
from polyfed.studies.compare.estimate import estimate_run
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis

HEAD_INITS = ("default", "initial")
SERVER_OPTIMIZERS: Mapping[str, str] = {
    "Adam 1e-3": "server_lr=0.001",
    "Adam 1e-3, epsilon 1e-3": "server_lr=0.001, server_eps=0.001",
    "SGD 0.65, frozen trunk": 'server_optimizer="sgd", server_lr=0.65, server_momentum=0.0, trunk_rate=0.0',
}
"""Without momentum, SGD at 0.65 moves a generated weight by about the clients' mean update: 0.65 by the bias, the rest through z."""
CELLS: Mapping[str, str] = {
    f"{init} heads, {name}": f'hfedf(head_init="{init}", {options})'
    for init in HEAD_INITS
    for name, options in SERVER_OPTIMIZERS.items()
}
DEFAULT = "initial heads, Adam 1e-3"
SETTINGS: Mapping[str, Any] = {
    "data": 'pacs(size=32, augment="domainbed", normalise="imagenet")',
    "model": "hfedf_cnn",
    "unseen_part": "all",
    "optimizer": "adam",
    "lr": 1e-3,
    "weight_decay": 1e-3,
    "batch_size": 64,
    "local_epochs": 2,
    "layout": "channels_last",
}
"""The settings of hfedf/table-11 with one domain per client, and the fastest memory layout."""
BEST = 2
"""Cells that get a second seed."""

Turn: TypeAlias = tuple[int, str]
"""A seed and the domain that is held out."""


@dataclass(frozen=True)
class Scored:
    """One run on source validation data: its score (None if it diverged), and the relative spread of client weights by round."""

    validation: float | None
    spread: list[float]


Found: TypeAlias = dict[str, dict[Turn, Scored]]
"""Runs by cell and turn."""


def settings(asked: argparse.Namespace, turn: Turn) -> dict[str, Any]:
    seed, target = turn
    return {**SETTINGS, "rounds": asked.rounds, "root": asked.root, "seed": seed, "unseen": (target,)}


def search(asked: argparse.Namespace, turn: Turn, cells: Sequence[str]) -> Sweep:
    """Train, resume or read these cells with one seed and one held-out domain, without test scores."""
    own = settings(asked, turn)
    sweep = Sweep(
        Settings(**own), [CELLS[cell] for cell in cells], [Axis("lr", (own["lr"],))], Path(asked.out) / f"{turn[1]}-seed{turn[0]}"
    )
    sweep.search()
    return sweep


def scored(sweep: Sweep, cells: Sequence[str]) -> dict[str, Scored]:
    runs = {}
    for cell, one in zip(cells, sweep.searched, strict=True):
        if not one.scores:
            raise SystemExit(f"{cell} cannot be run: {one.problem}")
        lines = RunFolder(one.scores[0].trial.folder).metrics()
        spread = [float(line["relative"]) for line in lines if line["view"] == "spread" and line["kind"] == "weight"]
        runs[cell] = Scored(one.scores[0].validation, spread)
    return runs


def ranked(found: Found) -> dict[str, float]:
    """Return the mean validation score of each cell over the turns that all cells have, best first, without diverged cells."""
    common = set.intersection(*(set(runs) for runs in found.values()))
    means = {
        cell: statistics.fmean(values)
        for cell, runs in found.items()
        if None not in (values := [runs[turn].validation for turn in sorted(common)])
    }
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def table(found: Found) -> str:
    """Format the grid as Markdown, best cell first. Deviations are over seeds; the spread of weights is that of the last round."""
    targets = sorted({target for runs in found.values() for _, target in runs})
    heads = ["cell", *(f"without {target}" for target in targets), "mean", "spread of weights", "runs"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    means = ranked(found)
    for cell in [*means, *(cell for cell in found if cell not in means)]:
        words = []
        for target in targets:
            values = [
                100 * one.validation for (_, each), one in found[cell].items() if each == target and one.validation is not None
            ]
            deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            words.append(f"{statistics.fmean(values):.1f}{deviation}" if values else "diverged")
        mean = f"{100 * means[cell]:.1f}" if cell in means else "diverged"
        spreads = [one.spread[-1] for one in found[cell].values() if one.spread]
        apart = f"{statistics.fmean(spreads):.3f}" if spreads else "-"
        lines.append("| " + " | ".join([cell, *words, mean, apart, str(len(found[cell]))]) + " |")
    return "\n".join(lines)


def write(asked: argparse.Namespace, found: Found) -> None:
    runs = [
        {"cell": cell, "method": CELLS[cell], "seed": seed, "target": target, "validation": one.validation, "spread": one.spread}
        for cell, many in found.items()
        for (seed, target), one in many.items()
    ]
    (Path(asked.out) / "grid.json").write_text(json.dumps(runs, indent=1), encoding="utf-8")
    (Path(asked.out) / "grid.md").write_text(table(found) + "\n", encoding="utf-8")


def estimated(asked: argparse.Namespace) -> str:
    """Estimate the core-hours of the grid from one measured run per target."""
    each = {}
    for target in asked.targets:
        values = settings(asked, (0, target))
        data, model = values.pop("data"), values.pop("model")
        each[target] = estimate_run(data, "hfedf", model, **values).cpu_seconds
    count = len(CELLS) * asked.seeds + BEST
    runs = ", ".join(f"{seconds / 60:.0f} core-minutes without {target}" for target, seconds in each.items())
    hours = count * sum(each.values()) / 3600
    return f"{count * len(each)} runs of {asked.rounds} rounds ({runs} each): {hours:.1f} core-hours."


def tested(asked: argparse.Namespace, turns: Sequence[Turn], chosen: str) -> list[dict[str, Any]]:
    """Return the accuracy on the held-out domain of the selected cell, the default and FedAvg."""
    rows = []
    cells = list(dict.fromkeys((chosen, DEFAULT)))
    for turn in turns:
        sweep = search(asked, turn, cells)
        for cell, one in zip(cells, sweep.searched, strict=True):
            result = sweep.final(one.scores[0].trial, turn[0], sweep.next_run(cell))
            rows.append({"method": result.experiment.settings.method, "turn": turn, **result.accuracy, "digest": result.digest})
        values = settings(asked, turn)
        result = polyfed.run(values.pop("data"), "fedavg", out=Path(asked.out) / "fedavg" / f"{turn[1]}-seed{turn[0]}", **values)
        rows.append({"method": "fedavg", "turn": turn, **result.accuracy, "digest": result.digest})
        print(json.dumps(rows[-len(cells) - 1 :]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--out", default="runs/hfedf-grid")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--seeds", type=int, default=1, help="seeds of every cell; the best two get one more (default: %(default)s)"
    )
    parser.add_argument("--targets", nargs="+", default=["photo", "sketch"])
    parser.add_argument("--estimate", action="store_true", help="train nothing: print what the grid would cost")
    parser.add_argument("--test", action="store_true", help="after the grid: test what it chose")
    asked = parser.parse_args()
    if asked.estimate:
        print(estimated(asked))
        return
    found: Found = {cell: {} for cell in CELLS}
    cells = list(CELLS)
    seeds = range(asked.seeds + 1)
    for seed in seeds:
        for target in asked.targets:
            for cell, one in scored(search(asked, (seed, target), cells), cells).items():
                found[cell][seed, target] = one
        write(asked, found)
        print(f"seed {seed}:\n{table(found)}", flush=True)
        best = list(ranked({cell: found[cell] for cell in cells}))[:BEST]
        if not best:
            raise SystemExit("Every cell diverged.")
        cells = best if seed + 1 >= asked.seeds else cells
    print(f"Chosen on source validation: {cells[0]}: {CELLS[cells[0]]}")
    if asked.test:
        rows = tested(asked, [(seed, target) for seed in seeds for target in asked.targets], cells[0])
        (Path(asked.out) / "tests.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
