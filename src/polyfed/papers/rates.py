"""Logs of searches for a learning rate on validation data, which a row names with ``chosen = "searches/NAME.json"``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import SettingError
from polyfed.papers.files import OPEN, PAPER

FOLDER = Path(__file__).parent
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
"""What a log contains, and nothing else: there is no place for a test score."""


def is_log(chosen: str) -> bool:
    """Return True if a row's ``chosen`` names a log."""
    return bool(chosen) and chosen.partition(":")[0].strip() not in (PAPER, OPEN)


def read_log(chosen: str) -> dict[str, Any]:
    """Read and check the log that a row names."""
    file = FOLDER / chosen
    if not file.is_file():
        raise SettingError(
            f'There is no log {chosen} in {FOLDER.name}. Write it with benchmarks/choose_rate.py, or use chosen = "open".'
        )
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    problems = log_problems(document)
    if problems:
        raise SettingError(f"{chosen}: {' '.join(problems)}")
    return document


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
