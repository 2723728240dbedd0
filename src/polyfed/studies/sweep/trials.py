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
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import Candidate
from polyfed.studies.report.run_record import RunRecord
from polyfed.studies.sweep.space import Axis, Values

LONGEST_NAME = 60


@dataclass(frozen=True)
class Trial:
    """One setting that is tried."""

    values: Values
    settings: Settings
    folder: Path


@dataclass(frozen=True)
class Score:
    """What validation said of a trial.

    Attributes:
        trial: the trial.
        validation: the mean over clients of the metric of the search; None where training failed.
        clients: that metric of each client.
        problem: why training failed.
        stopped: the round after which it was stopped since it was behind; None where it was trained to its end.
    """

    trial: Trial
    validation: float | None
    clients: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    stopped: int | None = None

    @property
    def rounds(self) -> int:
        """The rounds that count against the budget; a trial that failed counts as a whole one."""
        return self.trial.settings.rounds if self.stopped is None else self.stopped

    @property
    def can_be_chosen(self) -> bool:
        """Whether it was trained to its end."""
        return self.validation is not None and self.stopped is None


@dataclass
class Searched:
    """The trials of one method, the chosen one, and its tests."""

    candidate: Candidate
    scores: list[Score] = field(default_factory=list)
    chosen: Score | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)
    problem: str = ""

    @property
    def method(self) -> str:
        """The method's text, with the settings of its own."""
        return self.candidate.label

    @property
    def own(self) -> dict[str, Any]:
        """The settings of the chosen runs that are this method's own: those it was given, and those that were searched."""
        chosen = {} if self.chosen is None else self.chosen.trial.values
        return {**self.candidate.own, **{name: value for name, value in chosen.items() if "." not in name}}

    @property
    def rounds(self) -> int:
        """The rounds of training that its trials took."""
        return sum(score.rounds for score in self.scores)


def name_of(settings: Settings, values: Values, source: str, chosen_by: str = "") -> str:
    """Return a folder name that differs if the settings or the data do, or the metric if it decides how the run ends."""
    described = {name: value for name, value in settings.to_dict().items() if name not in ("checkpoint_every", "metric")}
    described["method"] = parse(settings.method).full_text  # a default may change between two searches
    described |= {"chosen_by": chosen_by} if chosen_by else {}
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
        "stopped_after": score.stopped,
        "validation": score.validation,
        "validation_by_client": dict(score.clients),
        "run": str(score.trial.folder.relative_to(folder)),
        "problem": score.problem or None,
    }
