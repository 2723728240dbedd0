"""Scores as lines of ``metrics.jsonl``, and which rounds count: the chosen one, or the last ones with their mean and deviation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.data_types import Federation
from polyfed.core.evaluation import Row, mean_numbers
from polyfed.errors import DataError
from polyfed.settings import BY_VALIDATION, Settings

ByRound = Mapping[int, Sequence[Row]]
WINDOW = 10
"""The last round is compared with at most this many scored rounds, itself included."""
MIN_BEFORE = 3
"""With fewer scored rounds before the last, their deviation says too little."""
DEVIATIONS = 2
VIEWS = ("seen", "unseen")
NOT_NUMBERS = ("round", "view", "client", "domain", "selected_round")
COUNTED = ("confusion", "count", "pixels")


@dataclass(frozen=True)
class LastRounds:
    """The primary metric (mean over domains) after each of the last scored rounds."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float:
        """The sample standard deviation over these rounds."""
        return statistics.stdev(self.values.values())

    @property
    def last(self) -> float:
        return self.values[max(self.values)]

    @property
    def warning(self) -> str:
        """A sentence if the last round is more than two deviations from the mean of the rounds before it, else nothing.

        >>> LastRounds({50: 0.864, 60: 0.883, 70: 0.882, 80: 0.882, 90: 0.886, 100: 0.8405}).warning
        'Round 100 scores 84.0 %, but rounds 50 to 90 score 87.9 ± 0.9 %: the last round is not typical. Use --selection "mean_last(10)".'
        """
        *before, end = sorted(self.values)
        earlier = [self.values[number] for number in before]
        if len(earlier) < MIN_BEFORE or not all(map(math.isfinite, self.values.values())):
            return ""
        mean, deviation = statistics.fmean(earlier), statistics.stdev(earlier)
        if abs(self.last - mean) <= DEVIATIONS * deviation:
            return ""
        return (
            f"Round {end} scores {100 * self.last:.1f} %, but rounds {before[0]} to {before[-1]} score {100 * mean:.1f} ± "
            f'{100 * deviation:.1f} %: the last round is not typical. Use --selection "mean_last({WINDOW})".'
        )

    def as_json(self) -> dict[str, Any]:
        """The rounds, their scores, mean and deviation, and the last round's score."""
        return {
            "rounds": sorted(self.values),
            "values": [self.values[number] for number in sorted(self.values)],
            "mean": self.mean,
            "deviation": self.deviation,
            "last": self.last,
        }


def scored_rounds(metrics: Iterable[Mapping[str, Any]], split: str = "test") -> dict[int, list[Row]]:
    """The scores of every scored round, from lines of metrics."""
    views = VIEWS if split == "test" else (split,)
    found: dict[int, list[Row]] = {}
    for line in metrics:
        if line["view"] in views and "count" in line:
            found.setdefault(int(line["round"]), []).append(_row(line))
    return found


def mean_rows(by_round: ByRound) -> list[Row]:
    """One row for each client and domain: the mean over the rounds. The confusion matrix, which counts images, is the last round's."""
    numbers: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for rows in by_round.values():
        for row in rows:
            numbers.setdefault((row.view, row.client, row.domain), []).append(row.numbers)
    made = []
    for row in by_round[max(by_round)]:
        counted = {key: row.numbers[key] for key in COUNTED if key in row.numbers}
        made.append(Row(row.view, row.client, row.domain, mean_numbers(numbers[row.view, row.client, row.domain]) | counted))
    return made


def as_line(number: int, row: Row) -> dict[str, Any]:
    """Return a score as a line of metrics."""
    return {"round": number, "view": row.view, "client": row.client, "domain": row.domain, **row.numbers}


def rows_at(metrics: Iterable[Mapping[str, Any]], number: int, split: str = "test") -> list[Row]:
    """Return the scores of one round from lines of metrics; those of the chosen round, if one was chosen."""
    views = VIEWS if split == "test" else (split,)
    lines = [dict(line) for line in metrics if line["round"] == number]
    selected = [{**line, "view": line["view"].removeprefix("selected_")} for line in lines if line["view"].startswith("selected_")]
    return [_row(line) for line in selected or [line for line in lines if line["view"] in views]]


def _row(line: Mapping[str, Any]) -> Row:
    return Row(line["view"], line["client"], line["domain"], {key: line[key] for key in line if key not in NOT_NUMBERS})


LAST = "last"
BEST_VALIDATION, BEST_LOCAL_VALIDATION = BY_VALIDATION


def require_validation(federation: Federation, settings: Settings) -> None:
    """Refuse data on which no round can be chosen, or the run be stopped, before anything is trained."""
    if settings.needs_validation:
        need, instead = f"--selection {settings.selection} chooses a round on validation data", f"Use --selection {LAST}"
    elif settings.patience:
        need, instead = f"--early-stopping {settings.early_stopping} goes by validation data", "Leave it out"
    else:
        return
    if lacking := federation.without_validation():
        raise DataError(
            f"{need}, and {lacking}. {instead}, "
            "or data with a validation part (a data set's own option where it has one, such as validation=0.1)."
        )
