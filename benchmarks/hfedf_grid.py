"""hFedF on PACS: which start of the heads, epsilon of Adam and rate of the trunk, chosen on images of the source domains only.

python benchmarks/hfedf_grid.py DATA_ROOT [--out DIR] [--rounds 30] [--seeds 3] [--targets photo sketch] [--estimate] [--test]

Every trial is a run folder that holds the spread of clients' models by round; a stopped grid goes on where it was. Trials get data whose
tests cannot be read. All cells have their turn with one seed before the next seed begins, so a grid that is cut short compares like with
like. --test trains nothing but FedAvg: it tests what was chosen, the start with the model's own values, and FedAvg on the unseen domain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import polyfed
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import Settings
from polyfed.studies.compare.estimate import estimate_run
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis
from polyfed.studies.sweep.trials import Score, values_words

GRID = (
    Axis("hfedf.head_init", ("default", "initial")),
    Axis("hfedf.server_eps", (1e-8, 1e-4, 1e-3)),
    Axis("hfedf.trunk_rate", (1.0, 0.1)),
)
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
"""Those of hfedf/table-11, one domain a client; images lie in memory as it is fastest."""

BEFORE = {"hfedf.head_init": "initial", "hfedf.server_eps": 1e-8, "hfedf.trunk_rate": 1.0}
Turn: TypeAlias = tuple[int, str]
"""A seed and the domain that is left out."""

Found: TypeAlias = dict[str, dict[Turn, float]]
"""Accuracy on source validation, by cell and turn."""


def settings(asked: argparse.Namespace, turn: Turn) -> dict[str, Any]:
    seed, target = turn
    return {**SETTINGS, "rounds": asked.rounds, "root": asked.root, "seed": seed, "unseen": (target,)}


def search(asked: argparse.Namespace, turn: Turn) -> tuple[Sweep, list[Score]]:
    """Every cell of the grid with one seed and one domain left out: trained, resumed or read back; nothing is tested."""
    sweep = Sweep(Settings(**settings(asked, turn)), ["hfedf"], GRID, Path(asked.out) / f"{turn[1]}-seed{turn[0]}")
    (one,) = sweep.search()
    return sweep, one.scores


def relative_spread(score: Score) -> float:
    """How far clients' weights lie apart after the last round, as a share of their size."""
    lines = [line for line in RunFolder(score.trial.folder).metrics() if line["view"] == "spread" and line["kind"] == "weight"]
    return float(lines[-1]["relative"])


def mean_validation(found: Found) -> dict[str, float]:
    """The mean of each cell over the turns that every cell has had, the best first."""
    common = set.intersection(*(set(by_turn) for by_turn in found.values()))
    means = {cell: statistics.fmean(by_turn[turn] for turn in common) for cell, by_turn in found.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def table(found: Found, spreads: Found) -> str:
    """The grid in Markdown, the best cell first; deviations are over seeds."""
    turns = sorted({turn for by_turn in found.values() for turn in by_turn})
    targets = sorted({target for _, target in turns})
    heads = [f"without {target}" for target in targets]
    lines = ["| " + " | ".join(["cell", *heads, "mean", "spread of weights", "turns"]) + " |", "|" + "---|" * (len(heads) + 4)]
    for cell, mean in mean_validation(found).items():
        by_target = [[100 * value for (_, target), value in found[cell].items() if target == each] for each in targets]
        words = [f"{statistics.fmean(v):.1f}" + (f" ± {statistics.stdev(v):.1f}" if len(v) > 1 else "") for v in by_target]
        apart = statistics.fmean(spreads[cell].values())
        lines.append("| " + " | ".join([cell, *words, f"{100 * mean:.1f}", f"{apart:.3f}", str(len(found[cell]))]) + " |")
    return "\n".join(lines)


def estimated(asked: argparse.Namespace, turns: list[Turn]) -> str:
    """Core-hours of the whole grid, from one measured run of each target."""
    cells = len(list(itertools.product(*(axis.values for axis in GRID))))
    each = {}
    for turn in turns:
        if turn[1] not in each:
            values = settings(asked, turn)
            data, model = values.pop("data"), values.pop("model")
            each[turn[1]] = estimate_run(data, "hfedf", model, **values).cpu_seconds
    hours = sum(cells * each[target] for _, target in turns) / 3600
    runs = ", ".join(f"{seconds / 60:.0f} core-minutes without {target}" for target, seconds in each.items())
    return f"{cells * len(turns)} runs of {asked.rounds} rounds ({runs} each): {hours:.1f} core-hours."


def tested(asked: argparse.Namespace, turns: list[Turn], chosen: str) -> list[dict[str, Any]]:
    """Accuracy on the unseen domain of the chosen cell, of the cell that was the default before, and of FedAvg."""
    rows = []
    for turn in turns:
        sweep, scores = search(asked, turn)
        by_cell = {values_words(score.trial.values): score for score in scores}
        for cell in dict.fromkeys((chosen, values_words(BEFORE))):
            result = sweep.final(by_cell[cell].trial, turn[0], sweep.next_run(cell))
            rows.append({"method": result.experiment.settings.method, "turn": turn, **result.accuracy, "digest": result.digest})
        values = settings(asked, turn)
        result = polyfed.run(values.pop("data"), "fedavg", out=Path(asked.out) / "fedavg" / f"{turn[1]}-seed{turn[0]}", **values)
        rows.append({"method": "fedavg", "turn": turn, **result.accuracy, "digest": result.digest})
        print(json.dumps(rows[-3:]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--out", default="runs/hfedf-grid")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--targets", nargs="+", default=["photo", "sketch"])
    parser.add_argument("--estimate", action="store_true", help="train nothing: say what the grid would cost")
    parser.add_argument("--test", action="store_true", help="after the grid: test what it chose")
    asked = parser.parse_args()
    turns = [(seed, target) for seed in range(asked.seeds) for target in asked.targets]
    if asked.estimate:
        print(estimated(asked, turns))
        return
    found: Found = {}
    spreads: Found = {}
    for turn in turns:
        for score in search(asked, turn)[1]:
            if score.validation is not None:
                cell = values_words(score.trial.values)
                found.setdefault(cell, {})[turn] = score.validation
                spreads.setdefault(cell, {})[turn] = relative_spread(score)
        (Path(asked.out) / "grid.md").write_text(table(found, spreads) + "\n", encoding="utf-8")
        print(f"seed {turn[0]}, without {turn[1]}:\n{table(found, spreads)}", flush=True)
    chosen = next(iter(mean_validation(found)))
    print(f"Chosen on source validation: {chosen}.")
    if asked.test:
        rows = tested(asked, turns, chosen)
        (Path(asked.out) / "tests.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
