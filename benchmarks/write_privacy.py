"""Writes the tables of docs/results/privacy.md from the run folders that benchmarks/privacy_results.sh left.

python benchmarks/write_privacy.py OUT [PAGE]

Nothing is typed in: accuracy, spent epsilon and seconds are read from the folders, leakage from what the script stored. A run that is not there, or
has not ended, is listed as not run, with what it would take: CPU seconds of the runs with the same data, with or without noise.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "results" / "privacy.md"
BASES = ("fedavg + group_norm", "fedwon", "fedwon + agc")
EPSILONS = (None, 8.0, 3.0, 1.0)
SETS = ("digits-five", "ham10000")
BLOCK = re.compile(r"(?P<start><!-- from run folders: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
HEAD = (
    "| method | epsilon | epsilon spent | accuracy, % | balanced accuracy, % | leakage: AUC | leakage: TPR at 1 % FPR, % | CPU seconds |",
    "|---|---|---|---|---|---|---|---|",
)
OPTION = re.compile(r"\(.*?\)")


@dataclass(frozen=True)
class Run:
    """Return the results of a finished run."""

    base: str
    epsilon: float | None
    accuracy: float
    balanced: float
    spent: float | None
    seconds: float
    leakage: dict[str, Any] | None


def read(folder: Path, leakage: Path) -> Run | None:
    """Return a run; None if it is unfinished."""
    manifests = sorted((folder / "checkpoint").glob("manifest-*_final.json"))
    if not manifests or not (folder / "run.toml").exists():
        return None
    text = str(tomllib.loads((folder / "run.toml").read_text())["settings"]["method"])
    parts = [part.strip() for part in text.split(" + ")]
    noise = next((float(part.split("epsilon=")[1].rstrip(")").split(",")[0]) for part in parts if part.startswith("dp_sgd")), None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max(row["round"] for row in rows)
    seen = [row for row in rows if row["view"] == "seen" and row["round"] == last]
    spent = [row["privacy.epsilon_spent"] for row in rows if row["view"] == "privacy" and row["round"] == last]
    costs = json.loads(manifests[-1].read_text())["notes"]["costs"]
    file = leakage / f"{folder.name}.json"
    return Run(
        base_of([OPTION.sub("", part) for part in parts if not part.startswith("dp_sgd")]),
        noise,
        statistics.mean(row["accuracy"] for row in seen),
        statistics.mean(row["balanced_accuracy"] for row in seen),
        max(spent) if spent else None,
        float(costs["cpu_seconds"]["training"]),
        json.loads(file.read_text())["all"]["loss"] if file.exists() else None,
    )


def base_of(parts: Sequence[str]) -> str:
    """The planned method with these parts, in whatever order they stand."""
    return next((base for base in BASES if sorted(base.split(" + ")) == sorted(parts)), " + ".join(parts))


def runs_in(out: Path, name: str) -> dict[tuple[str, float | None], Run]:
    """Runs of a data set that have ended, by method and epsilon."""
    folders = sorted(path for path in (out / name).glob("*/") if path.is_dir())
    found = [run for folder in folders if (run := read(folder, out / "leakage" / name)) is not None]
    return {(run.base, run.epsilon): run for run in found}


def table(runs: dict[tuple[str, float | None], Run]) -> Iterator[str]:
    """All runs that were planned, those that did not run too."""
    yield from HEAD
    for base in BASES:
        for epsilon in EPSILONS:
            cells = cells_of(runs.get((base, epsilon))) if (base, epsilon) in runs else missing(runs.values(), epsilon)
            name = base if epsilon is None else f"{base} + dp_sgd"
            yield "| " + " | ".join((name, "infinite" if epsilon is None else f"{epsilon:g}", *cells)) + " |"


def cells_of(run: Run | None) -> tuple[str, ...]:
    """The cells of a run."""
    assert run is not None
    leaked = ("not measured", "not measured")
    if run.leakage is not None:
        leaked = (f"{run.leakage['auc']:.3f}", f"{100 * run.leakage['tpr_at_1_percent_fpr']:.1f}")
    scores = (f"{100 * run.accuracy:.1f}", f"{100 * run.balanced:.1f}")
    return ("" if run.spent is None else f"{run.spent:.3f}", *scores, *leaked, f"{run.seconds:.0f}")


def missing(runs: Any, epsilon: float | None) -> tuple[str, ...]:
    """The cells of a run that was not made."""
    alike = [run.seconds for run in runs if (run.epsilon is None) == (epsilon is None)]
    cost = f"about {statistics.median(alike):.0f}" if alike else "no run to go by"
    return ("", "not run", "", "", "", cost)


def main(arguments: Sequence[str]) -> None:
    out, page = Path(arguments[0]), Path(arguments[1]) if len(arguments) > 1 else PAGE

    def block(found: re.Match[str]) -> str:
        return f"{found['start']}{chr(10).join(table(runs_in(out, found['name'])))}\n{found['end']}"

    page.write_text(BLOCK.sub(block, page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
