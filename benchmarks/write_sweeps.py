"""Write tables of finished sweeps into a page: the selected settings of each method, and their test scores.

python benchmarks/write_sweeps.py PAGE OUT

Each block ``<!-- sweep: NAME -->`` ... ``<!-- end -->`` of PAGE gets the table of the sweep in OUT/NAME, the best mean first. Nothing is typed in.
A block whose sweep is not in OUT is unchanged, with a warning.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(?P<start><!-- sweep: (?P<name>[\w/-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
HEAD = ("| method | chosen | validation, % | test: mean, % | worst domain, % | digests by seed |", "|---|---|---|---|---|---|")


def percent(values: Sequence[float]) -> str:
    """A mean, with the deviation over seeds where there are several."""
    words = f"{100 * statistics.fmean(values):.1f}"
    return f"{words} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else words


def headline(test: dict[str, Any]) -> dict[str, float]:
    """Return the primary metric of a run; older sweeps have only accuracy."""
    found: dict[str, float] = test.get("headline", test["accuracy"])
    return found


def row(found: dict[str, Any], seeds: int) -> str:
    """One method, with a problem if not all seeds could be run."""
    chosen, tests = found["chosen"], found["tests"]
    if chosen is None or not tests:
        return f"| `{found['method']}` | – | – | – | – | {found['problem']} |"
    values = ", ".join(f"{name} {value}" for name, value in chosen["values"].items())
    scores = [percent([headline(test)[measure] for test in tests]) for measure in ("mean", "worst")]
    digests = ", ".join(f"{test['seed']}: `{test['digest'][:12]}`" for test in tests)
    short = f"; {len(tests)} of {seeds} seeds: {found['problem'].split('. ')[0]}" if found["problem"] else ""
    return f"| `{found['method']}` | {values} | {100 * chosen['validation']:.1f} | {' | '.join(scores)} | {digests}{short} |"


def mean_of(found: dict[str, Any]) -> float:
    """By which rows are ordered: methods that failed with a seed come last."""
    return -1.0 if found["problem"] or not found["tests"] else statistics.fmean(headline(test)["mean"] for test in found["tests"])


def table(folder: Path) -> str:
    """A sweep in Markdown, with the commits that its runs were trained with."""
    found = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    rows = [row(one, len(found["final_seeds"])) for one in sorted(found["methods"], key=mean_of, reverse=True)]
    commits = sorted({commit_of(Path(test["run"])) for one in found["methods"] for test in one["tests"]})
    return "\n".join([*HEAD, *rows, "", f"Commit `{'`, `'.join(commits)}`.", ""])


def commit_of(run: Path) -> str:
    """The commit that trained a run; the sweep's own is that of its last reader."""
    made_with = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))["made_with"]
    return str(made_with["commit"])[:7]


def write(page: Path, out: Path) -> None:
    """Write every block of a page anew whose sweep is there."""

    def written(block: re.Match[str]) -> str:
        if not (out / block["name"] / "sweep.json").is_file():
            print(f"Left as it is: {block['name']}")
            return block.group()
        return block["start"] + table(out / block["name"]) + block["end"]

    page.write_text(BLOCK.sub(written, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
