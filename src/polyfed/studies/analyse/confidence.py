"""Compare the model's confidence in right and in wrong predictions, on seen and unseen domains (hFedF Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from polyfed.errors import DataError
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.final_files import Answers
from polyfed.studies.analyse.local_models import require_data

BINS = 20


@dataclass(frozen=True)
class Confidence:
    """The probability of the predicted class, over the right or the wrong predictions of one view (seen or unseen).

    ``histogram`` holds the fractions of predictions in equal bins from 0 to 1. ``mean`` is NaN without predictions.
    """

    view: str
    right: bool
    count: int
    mean: float
    histogram: Sequence[float]


def confidence(answers: Answers, bins: int = BINS) -> list[Confidence]:
    """Return the confidence in right and in wrong predictions for each view, from ``result.answers``."""
    if not answers:
        raise DataError("The run has no predictions per image: its task has none, or its models were scored as an ensemble.")
    found = []
    for view in ("seen", "unseen"):
        parts = [values for key, values in answers.items() if key[0] == view]
        for right in (True, False) if parts else ():
            values = torch.cat([one["confidence"][(one["labels"] == one["answers"]) == right].double() for one in parts])
            fractions = (torch.histc(values, bins, 0.0, 1.0) / max(len(values), 1)).tolist()
            mean = float(values.mean()) if len(values) else float("nan")
            found.append(Confidence(view, right, len(values), mean, fractions))
    return found


def answers_of(experiment: Experiment) -> Answers:
    """Recompute the predictions of a run that stored none; this needs its data."""
    require_data(experiment)
    bench = experiment.bench
    bench.answers = {}
    try:
        experiment.evaluate(in_detail=True)
        found: Mapping[tuple[str, str, str], Mapping[str, torch.Tensor]] = bench.answers
    finally:
        bench.answers = None
    return found
