"""How sure a model is of its right and of its wrong answers, on seen and on unseen domains (hFedF Figure 3)."""

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
    """The probability of the answered class, for the right or the wrong answers of one view.

    Attributes:
        view: seen or unseen.
        right: of right answers, or of wrong ones.
        count: number of answers.
        mean: mean probability; NaN where there are none.
        histogram: shares of the answers in equal bins from 0 to 1.
    """

    view: str
    right: bool
    count: int
    mean: float
    histogram: Sequence[float]


def confidence(answers: Answers, bins: int = BINS) -> list[Confidence]:
    """Right and wrong answers of each view, with how sure the model was of them.

    Args:
        answers: of a run (``result.answers``).
        bins: of the histogram.
    """
    if not answers:
        raise DataError("The run has no answers to single images; its task has none, or its models were scored together.")
    return [
        _one(answers, view, right, bins)
        for view in ("seen", "unseen")
        if any(key[0] == view for key in answers)
        for right in (True, False)
    ]


def _one(answers: Answers, view: str, right: bool, bins: int) -> Confidence:
    parts = [found for key, found in answers.items() if key[0] == view]
    values = torch.cat([one["confidence"][(one["labels"] == one["answers"]) == right].double() for one in parts])
    counts = torch.histc(values, bins, 0.0, 1.0)
    shares = (counts / max(len(values), 1)).tolist()
    return Confidence(view, right, len(values), float(values.mean()) if len(values) else float("nan"), shares)


def answers_of(experiment: Experiment) -> Answers:
    """The answers of a run that left none, asked again; its data are needed."""
    require_data(experiment)
    bench = experiment.bench
    bench.answers = {}
    try:
        experiment.evaluate(in_detail=True)
        found: Mapping[tuple[str, str, str], Mapping[str, torch.Tensor]] = bench.answers
    finally:
        bench.answers = None
    return found
