"""Trials of a search: what was tried, what validation said of it, and how that is written down."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.runs.run_folder import plain
from polyfed.settings import Settings
from polyfed.sweeps.space import Axis, Values

LONGEST_NAME = 60


@dataclass(frozen=True)
class Trial:
    """One setting that is tried."""

    values: Values
    settings: Settings
    folder: Path


@dataclass(frozen=True)
class Score:
    """What validation said of a trial; ``validation`` is the mean accuracy over clients, None where training failed."""

    trial: Trial
    validation: float | None
    clients: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass
class Searched:
    """The trials of one method, the chosen one, and its tests."""

    method: str
    scores: list[Score] = field(default_factory=list)
    chosen: Score | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


def name_of(settings: Settings, values: Values, source: str) -> str:
    """A folder name that differs where the settings or the data do."""
    described = {name: value for name, value in plain(settings).items() if name not in ("checkpoint_every", "metric")}
    described["method"] = parse(settings.method).full_text  # a default may change between two searches
    digest = hashlib.sha256(json.dumps([described, source], sort_keys=True).encode()).hexdigest()[:10]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{settings.method} {values_words(values)} seed{settings.seed}").strip("-.")[
        :LONGEST_NAME
    ]
    return f"{words.rstrip('-.')}-{digest}"


def values_words(values: Values) -> str:
    """Values in words.

    >>> values_words({"lr": 0.03, "fedprox.mu": 0.01})
    'lr=0.03 fedprox.mu=0.01'
    """
    return " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())


def edges(one: Searched, axes: Sequence[Axis]) -> list[str]:
    """Names whose chosen value is the smallest or largest of three or more numbers tried: better ones may lie beyond."""
    if one.chosen is None:
        return []
    found = []
    for axis in axes:
        numbers = [v for v in axis.values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(set(numbers)) > 2 and one.chosen.trial.values.get(axis.name) in (min(numbers), max(numbers)):
            found.append(axis.name)
    return found


def score_json(score: Score, folder: Path) -> dict[str, Any]:
    """A trial as JSON."""
    return {
        "values": dict(score.trial.values),
        "method": score.trial.settings.method,
        "rounds": score.trial.settings.rounds,
        "validation": score.validation,
        "validation_by_client": dict(score.clients),
        "run": str(score.trial.folder.relative_to(folder)),
        "problem": score.problem or None,
    }
