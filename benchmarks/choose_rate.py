"""Choose the learning rate of an experiment's row on validation data, and log the search.

python benchmarks/choose_rate.py fedstein/table-1 --part Digits-Five --row FedStein --validation 0.2 --root DATA --log NAME.json
python benchmarks/choose_rate.py fedstein/table-1 --part Office-Caltech-10 --row FedStein --root DATA --log NAME.json

Every rate trains once, with one seed and one thread, on the row's settings. Test data cannot be read. Each trial is a run folder in
--out: run the same command again to resume. Copy the log to docs/results/rates (or run benchmarks/queue import) and set it in the row:
chosen = "rates/NAME.json".
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.papers.files import FORMS, PaperItem, Part, Row, read_item
from polyfed.papers.grid import Form, settings_of
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.run_folder import versions
from polyfed.settings import Settings, read_change
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis
from polyfed.studies.sweep.trials import edges
from polyfed.text import read_call, write_call

GRID = (0.001, 0.003, 0.01, 0.03, 0.1)
KEYS = (
    "experiment",
    "part",
    "row",
    "form",
    "method",
    "data",
    "source",
    "changes",
    "grid",
    "rounds",
    "seed",
    "chosen_by",
    "validation",
    "failed",
    "chosen",
    "at_the_edge",
    "command",
    "commit",
    "versions",
)
"""All entries of a log. Test scores are not allowed."""


def asked_for(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("experiment", help="such as fedstein/table-1")
    parser.add_argument("--part", default="", help="name of the part; default: the first one")
    parser.add_argument("--row", required=True, help="name of the row, such as FedStein")
    parser.add_argument("--lr", default=",".join(f"{rate:g}" for rate in GRID), help="candidate rates (default: %(default)s)")
    parser.add_argument("--validation", type=float, help="fraction of the training images for validation, if the data set has none")
    parser.add_argument("--form", default=FORMS[0], choices=FORMS, help="form of the experiment (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="change a setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", help="folder that contains the data set's files")
    parser.add_argument("--out", default="runs/choose-rate", help="folder of the trials (default: %(default)s)")
    parser.add_argument("--log", required=True, help="file to write")
    return parser.parse_args(words)


def found_row(item: PaperItem, part: str, row: str) -> tuple[Part, Row]:
    """Return the part and the row, or raise an error that names the nearest one."""
    parts = [each for each in item.parts if each.name == part] if part else list(item.parts[:1])
    if not parts:
        raise SettingError(f"{item.name} has no part {part!r}. {nearest(part, [each.name for each in item.parts])}")
    rows = {each.name: each for each in parts[0].rows}
    if row not in rows:
        raise SettingError(f"{item.name} has no row {row!r}. {nearest(row, list(rows))}")
    return parts[0], rows[row]


def trial_settings(asked: argparse.Namespace, item: PaperItem) -> Settings:
    """Return the settings of every trial, without the learning rate."""
    part, row = found_row(item, asked.part, asked.row)
    changes: dict[str, Any] = {**dict(map(read_change, asked.changes)), "seed": asked.seed, "threads": 1}
    if asked.root is not None:
        changes["root"] = asked.root
    settings = settings_of(item, part, row, part.columns[0], Form(asked.form, changes=changes))
    if asked.validation is None:
        return settings
    data = read_call(settings.data)
    text = write_call(data.spelled or data.name, {**data.named, "validation": asked.validation})
    return settings_of(item, part, row, part.columns[0], Form(asked.form, changes={**changes, "data": text}))


def command_of(asked: argparse.Namespace) -> str:
    """Return the command, without folders of this machine."""
    words = ["python", "benchmarks/choose_rate.py", asked.experiment, *(["--part", asked.part] if asked.part else [])]
    words += ["--row", asked.row, "--lr", asked.lr, "--form", asked.form, "--seed", str(asked.seed)]
    words += ["--validation", f"{asked.validation:g}"] if asked.validation is not None else []
    words += [word for change in asked.changes for word in ("--set", change)]
    return shlex.join([*words, "--root", "DATA", "--log", Path(asked.log).name])


def search(asked: argparse.Namespace) -> dict[str, Any]:
    """Train the candidates and return the log."""
    item = read_item(asked.experiment)
    settings, grid = trial_settings(asked, item), tuple(float(rate) for rate in asked.lr.split(","))
    sweep = Sweep(settings, [settings.method], [Axis("lr", grid)], asked.out)
    (one,) = sweep.search()
    if one.chosen is None:
        raise PolyfedError(one.problem)
    scores = {f"{score.trial.values['lr']:g}": score for score in one.scores}
    made_with = versions()
    mean = f" over the last {settings.averaged_rounds} rounds" if settings.averaged_rounds else ""
    best = " in its best round" if settings.needs_validation else ""
    return {
        "experiment": item.name,
        "part": asked.part,
        "row": asked.row,
        "form": asked.form,
        "method": settings.method,
        "data": settings.data,
        "source": sweep.whole.source,
        "changes": dict(asked_change.split("=", 1) for asked_change in asked.changes),
        "grid": list(grid),
        "rounds": settings.rounds,
        "seed": asked.seed,
        "chosen_by": f"{sweep.document()['chosen_by']}{mean}{best}",
        "validation": {rate: score.validation for rate, score in scores.items() if score.validation is not None},
        "failed": {rate: score.problem for rate, score in scores.items() if score.validation is None},
        "chosen": one.chosen.trial.values["lr"],
        "at_the_edge": bool(edges(one, sweep.axes)),
        "command": command_of(asked),
        "commit": made_with.pop("commit", ""),
        "versions": made_with,
    }


def log_problems(document: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a log: keys, candidate rates, validation scores, and the chosen rate."""
    problems = [f"The entry {key!r} does not belong in the log of a search." for key in document if key not in KEYS]
    problems += [f"The entry {key!r} is missing." for key in KEYS if key not in document]
    if problems:
        return problems
    grid, scores, failed = document["grid"], document["validation"], document["failed"]
    tried = sorted(float(rate) for rate in (*scores, *failed))
    if len(set(grid)) < 2 or tried != sorted(map(float, grid)):
        problems.append("Every one of two or more rates needs a validation score or the reason of its failure.")
    if not scores or not all(isinstance(score, float) and math.isfinite(score) for score in scores.values()):
        problems.append("Validation scores are finite numbers.")
    elif float(document["chosen"]) != float(max(scores, key=lambda rate: scores[rate])):
        problems.append(f"The chosen rate {document['chosen']} does not have the best validation score.")
    return problems


def main(words: list[str] | None = None) -> None:
    """Search, and write the log."""
    asked = asked_for(words)
    log = search(asked)
    problems = log_problems(log)
    if problems:
        raise SystemExit(" ".join(problems))
    file = Path(asked.log)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(log, indent=1, allow_nan=False) + "\n")
    for rate, score in log["validation"].items():
        print(f"lr {rate}: {100 * score:.2f} % on validation data")
    print(f"chosen: {log['chosen']:g}{' (at the edge of the grid)' if log['at_the_edge'] else ''}; log: {file}")


if __name__ == "__main__":
    try:
        main()
    except PolyfedError as error:
        sys.exit(str(error))
