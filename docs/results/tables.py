"""Writes the measured tables of the pages in this folder from run folders, between their ``<!-- runs: NAME -->`` marks.

Run: .venv/bin/python docs/results/tables.py RUNS        (RUNS holds the run folders of the pages' recipes, at any depth)

A run belongs to the recipe whose settings it has, whatever its seed; nothing is typed in by hand. Runs that have not ended are left out.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.data.registry import data_sets
from polyfed.recipes import read
from polyfed.reports import costs as report_costs
from polyfed.reports.gather import DEFAULTS, INCIDENTAL, MEAN, WORST, GroupEntry, Run, read_run
from polyfed.reports.sections import declared_uploads, spent_by
from polyfed.text import read_call

HERE = Path(__file__).parent
NOT_COMPARED = (*INCIDENTAL, "data")
MARK = re.compile(r"(<!-- runs: (?P<name>[a-z]+)\s(?P<recipes>[^>]+?)\s*-->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One recipe with its finished runs, a seed each."""

    recipe: str
    label: str
    runs: Sequence[Run]

    def value(self, view: str, key: Any, number: int | None = None) -> str:
        """The score in a round (default: the last) as mean and deviation over seeds, in percent."""
        found = [100 * table[key] for run in self.runs if (table := self._table(run, view, number)) and key in table]
        if not found:
            return "–"
        return f"{statistics.fmean(found):.1f}" + (f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else "")

    @staticmethod
    def _table(run: Run, view: str, number: int | None) -> Mapping[Any, float]:
        tables = run.tables[view]
        return tables.get(max(tables) if number is None else number, {}) if tables else {}


def accuracy(rows: Sequence[Row]) -> list[str]:
    """Accuracy by domain, seen ones and then unseen ones."""
    seen = _domains(rows, "seen")
    unseen = _domains(rows, "unseen")
    head = ["method", *seen, *(["mean", "worst"] if seen else []), *(f"unseen: {domain}" for domain in unseen), "seeds"]
    lines = _head(head)
    for row in rows:
        cells = [row.value("seen", domain) for domain in seen]
        cells += [f"**{row.value('seen', MEAN)}**", row.value("seen", WORST)] if seen else []
        cells += [f"**{row.value('unseen', domain)}**" for domain in unseen]
        lines.append(_line([row.label, *cells, ", ".join(str(run.seed) for run in row.runs) or "none yet"]))
    return lines


def progress(rows: Sequence[Row]) -> list[str]:
    """Means over domains by round."""
    view = "unseen" if any(run.tables["unseen"] for row in rows for run in row.runs) else "seen"
    evaluated = [set(run.tables[view]) for row in rows for run in row.runs]
    rounds = sorted(set.intersection(*evaluated)) if evaluated else []
    return [
        *_head(["method", *(f"round {number}" for number in rounds)]),
        *(_line([row.label, *(row.value(view, MEAN, number) for number in rounds)]) for row in rows),
    ]


def costs(rows: Sequence[Row]) -> list[str]:
    """Traffic by client and round, and cost and privacy relative to the table's own FedAvg; the columns are those of the report."""
    entries = [GroupEntry(row.label, measured(row.runs)) for row in rows if row.runs]
    reference = next((spent_by(one) for one in entries if one.first.method == report_costs.REFERENCE), None)
    lines = _head(["method", "MB up", "MB down", *report_costs.HEADS])
    for one in entries:
        run = one.first
        turns = run.rounds * int(run.settings["clients_per_round"] or run.document["data"]["clients"])
        traffic = [f"{sum(run.bytes(way, 'training').values()) / turns / 1e6:.2f}" for way in ("up", "down")]
        own = report_costs.expense_of(one.label, *declared_uploads(run), spent_by(one), reference)
        lines.append(_line([one.label, *traffic, *report_costs.cells(own)]))
    return lines


def measured(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs whose processor time was measured; all, where it was in none."""
    return [run for run in runs if run.costs.get("cpu_seconds")] or runs


def origins(rows: Sequence[Row]) -> list[str]:
    """Command, digest and commit of each run."""
    lines = _head(["method", "command", "seed", "digest", "commit"])
    for row in rows:
        for run in row.runs:
            layout = run.settings.get("layout", "channels_first")
            option = "" if layout == "channels_first" else f" --layout {layout}"
            command = f"`polyfed run --recipe {row.recipe} --root DATA --seed {run.seed}{option}`"
            commit = str(run.document["made_with"].get("commit", ""))[:7]
            lines.append(_line([row.label, command, str(run.seed), f"`{run.digest[:16]}`", f"`{commit}`"]))
    return lines


TABLES = {"accuracy": accuracy, "progress": progress, "costs": costs, "origins": origins}


def _domains(rows: Sequence[Row], view: str) -> list[str]:
    return list(dict.fromkeys(domain for row in rows for run in row.runs for v, domain in run.test_sizes if v == view))


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def settings_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two runs runs of one recipe, with every option of the data written out."""
    call = read_call(str(settings["data"]))
    rest = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items() if name not in NOT_COMPARED
    }
    known = data_sets.find(call.name)
    defaults = {name: parameter.default for name, parameter in known.signature.parameters.items() if name != "root"}
    return {**rest, **defaults, **call.named, "data": known.name}


def fits(run: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Whether a run has a recipe's settings; a run that names no model took the data set's own."""
    return all(run.get(name) == value or (name == "model" and run.get(name) is None) for name, value in recipe.items())


def finished_runs(folder: Path) -> list[tuple[dict[str, Any], Run]]:
    """All finished runs below a folder, with what they are."""
    runs = [read_run(file.parent) for file in sorted(folder.rglob("run.toml"))]
    # Options that came later have their defaults, with which the run was trained.
    return [({**settings_of(run.settings), "method": parse(run.all_options).full_text}, run) for run in runs if run.finished]


def rows_of(recipes: Sequence[str], runs: Sequence[tuple[dict[str, Any], Run]]) -> list[Row]:
    """A row for each recipe; a seed that was run twice counts once."""
    rows = []
    for name in recipes:
        recipe = read(name)
        wanted = {**settings_of({**DEFAULTS, **recipe.values}), "method": parse(str(recipe.values["method"])).full_text}
        by_seed = {run.seed: run for settings, run in runs if fits(settings, wanted)}
        rows.append(Row(name, recipe.title.split(" on ")[0], [by_seed[seed] for seed in sorted(by_seed)]))
    return rows


def main(folder: str) -> None:
    """Rewrite every page that has marks."""
    runs = finished_runs(Path(folder))
    for page in sorted(HERE.glob("*.md")):
        text = page.read_text()

        def written(match: re.Match[str]) -> str:
            rows = rows_of(match["recipes"].split(), runs)
            lines = TABLES[match["name"]]([row for row in rows if row.runs] or rows)
            return match[1] + "\n".join(lines) + "\n" + match[4]

        new = MARK.sub(written, text)
        if new != text:
            page.write_text(new)
            print(f"rewritten: {page.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
