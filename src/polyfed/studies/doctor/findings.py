"""Turn the measurements into findings, and the findings into a recommended method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.studies.doctor.measures import Measures

FINE = "batch norm is fine"
_NO_CLASS = "the task has no class labels"
_COLUMNS = ("statistics", "gradient bias", "label skew", "domains", "smallest batch", "model")
_ROWS: Mapping[str, tuple[float | None, ...]] = {
    "identical clients": (1.02, 0.95, 0.14, 0.98, 28, 0.14),
    "one inverted client": (3.29, 6.42, 0.14, 1.53, 28, 0.14),
    "darker and darker clients": (5.55, 6.66, 0.14, 1.37, 28, 0.14),
    "digits-mini": (6.41, 2.61, 0.0, 2.56, 12, 0.14),
    "digits-mini, iid": (1.05, 1.09, 0.07, 1.02, 12, 0.14),
    "digits-mini, shards": (1.39, 1.47, 0.8, None, 12, 0.14),
    "CIFAR-10, iid": (1.03, 1.07, 0.01, 1.0, 8, 1.09),
    "CIFAR-10, Dirichlet 0.1": (2.22, 1.46, 0.69, 1.13, 2, 1.09),
    "CIFAR-10, shards": (3.06, 1.51, 0.8, 1.14, 8, 1.09),
}
KNOWN: Mapping[str, Mapping[str, float]] = {
    name: {**{key: value for key, value in zip(_COLUMNS, row, strict=True) if value is not None}, "sampling": 1.0}
    for name, row in _ROWS.items()
}
"""Reference values of the findings on known federations, without client sampling.

They come from ``polyfed doctor NAME --json`` (see ``docs/doctor.md``). The limits below were set on digits-mini, partitions of CIFAR-10 and
synthetic shifts, before any other data set was examined.
"""

_TINY_BATCH = 4
"""Largest batch size with unreliable statistics."""
_MIN_PARTICIPATION = 0.5
"""Below this fraction of rounds, state kept at clients becomes stale."""
# The next four limits are multiples of the value for randomly assigned images.
_MAX_BIAS = 1.25
_MAX_SHIFT = 1.25
_MAX_DOMAIN_DISTANCE = 1.25
_OUTLIER_SHIFT = 2.0
_OUTLIER_TO_MEDIAN = 1.5
"""An outlier must also exceed this multiple of the median distance."""
_MAX_LABEL_SKEW = 0.3
"""Largest total variation of labels without a finding."""


@dataclass(frozen=True)
class Finding:
    """A measurement with its interpretation. ``is_large`` is True if the value argues against batch norm, or for a remedy."""

    name: str
    value: float
    unit: str
    is_large: bool
    sentence: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, float]:
        """Values of the same finding on known federations."""
        return {name: numbers[self.name] for name, numbers in KNOWN.items() if self.name in numbers}

    def as_json(self) -> dict[str, Any]:
        fields = ("name", "value", "unit", "is_large", "sentence", "known")
        return {**{name: getattr(self, name) for name in fields}, "details": dict(self.details)}


def _ratio(value: float, by_chance: float) -> float:
    """Return the value as a multiple of the value by chance, or 1 if both are 0."""
    return value / by_chance if by_chance > 0 else 1.0 if value <= 0 else math.inf


def _outliers(measures: Measures) -> list[str]:
    """Return the clients whose statistics differ clearly from those of the others, farthest first."""
    shift = measures.shift
    if len(shift) < 3:
        return []
    typical = max(statistics.median(shift.values()), measures.shift_by_chance)

    def is_outlier(value: float) -> bool:
        return value > _OUTLIER_TO_MEDIAN * typical and _ratio(value, measures.shift_by_chance) > _OUTLIER_SHIFT

    return sorted(filter(lambda client: is_outlier(shift[client]), shift), key=lambda client: -shift[client])


def findings(measures: Measures) -> list[Finding]:
    """Return all findings that apply, in display order."""
    missing = left_out(measures)
    about_norm = {"statistics": _statistics_finding, "gradient bias": _bias_finding} if measures.batch_norms else {}
    about_data = {"label skew": _label_finding, "domains": _domain_finding}
    others = {"smallest batch": _batch_finding, "sampling": _sampling_finding, "model": _size_finding}
    return [make(measures) for name, make in {**about_norm, **about_data, **others}.items() if name not in missing]


def left_out(measures: Measures) -> dict[str, str]:
    """Return the findings that do not apply to this task, with the reasons."""
    return dict.fromkeys(("label skew", "domains"), _NO_CLASS) if math.isnan(measures.label_skew) else {}


def _statistics_finding(measures: Measures) -> Finding:
    value = _ratio(statistics.fmean(measures.shift.values()), measures.shift_by_chance)
    outliers = _outliers(measures)
    if outliers:
        sentence = f"The batch-norm statistics of {', '.join(outliers)} differ from those of the other clients."
    elif value > _MAX_SHIFT:
        sentence = "Batch-norm statistics differ between clients, without outliers."
    else:
        sentence = "Batch-norm statistics are similar across clients."
    details = {"by_client": dict(measures.shift), "by_layer": dict(measures.shift_by_layer), "outliers": outliers}
    return Finding("statistics", value, "times chance", value > _MAX_SHIFT or bool(outliers), sentence, details)


def _bias_finding(measures: Measures) -> Finding:
    value = _ratio(measures.bias, measures.bias_by_chance)
    best = min(measures.other_bias, key=lambda norm: measures.other_bias[norm])
    against = f"{100 * measures.bias:.0f} % of the pooled gradient, {100 * measures.bias_by_chance:.0f} % by chance"
    if value > _MAX_BIAS:
        sentence = f"Batch norm biases the clients' mean gradient ({against}); {best} does not."
    else:
        sentence = f"The gradient bias of batch norm is about what this batch size causes ({against})."
    details = {"batch norm": measures.bias, "by chance": measures.bias_by_chance, **measures.other_bias}
    return Finding("gradient bias", value, "times chance", value > _MAX_BIAS, sentence, details)


def _label_finding(measures: Measures) -> Finding:
    value = measures.label_skew
    sentence = (
        f"On average, {100 * value:.0f} % of a client's labels would have to change to match the label distribution of all clients."
    )
    return Finding("label skew", value, "share", value > _MAX_LABEL_SKEW, sentence)


def _domain_finding(measures: Measures) -> Finding:
    if math.isnan(measures.domains):
        return Finding("domains", math.nan, "times chance", False, "No class has enough images at two clients for a comparison.")
    value = _ratio(measures.domains, measures.domains_by_chance)
    large = value > _MAX_DOMAIN_DISTANCE
    sentence = f"Images of the same class {'look different' if large else 'look alike'} at different clients."
    return Finding("domains", value, "times chance", large, sentence)


def _batch_finding(measures: Measures) -> Finding:
    value = measures.smallest_batch
    large = measures.batch_size <= _TINY_BATCH
    if large:
        verdict = "too small for batch statistics"
    else:
        verdict = "the last batch is smaller" if value < measures.batch_size else "large enough"
    sentence = f"Batches hold {measures.batch_size} images, the smallest {value}: {verdict}."
    return Finding("smallest batch", value, "images", large, sentence)


def _sampling_finding(measures: Measures) -> Finding:
    value = measures.sampled / measures.clients
    is_low = value < _MIN_PARTICIPATION
    effect = f"state kept at a client is {1 / value:.0f} rounds old on average" if is_low else "clients can keep state"
    sentence = f"{measures.sampled} of {measures.clients} clients take part in a round: {effect}."
    return Finding("sampling", value, "fraction of clients", is_low, sentence)


def _size_finding(measures: Measures) -> Finding:
    megabytes = measures.entries / 1e6
    sentence = (
        f"The model has {measures.parameters:,} parameters: {megabytes:.2f} MB to and from each client per round, and at least "
        f"{3 * megabytes:.1f} MB of memory for training (weights, gradients, one copy), without activations."
    )
    return Finding("model", megabytes, "MB", False, sentence)


@dataclass(frozen=True)
class Advice:
    verdict: str
    method: str
    runner_up: str
    reasons: tuple[str, ...]


def advise(found: Mapping[str, Finding]) -> Advice:
    """Return the advice that follows from these findings, by name."""

    def large(name: str) -> bool:
        return name in found and found[name].is_large

    reasons = tuple(one.sentence for one in found.values() if one.is_large)
    if "statistics" not in found:
        why = "The model has no batch norm."
        return Advice("the model has no batch norm", "fedavg", "fedavg + fedprox(mu=0.01)", (why, *reasons))
    if large("smallest batch"):
        why = "Statistics of such small batches are unreliable. Without norms, or with norms per image, the batch does not matter."
        return Advice("batch norm will hurt", "fedwon", "fedavg + group_norm", (*reasons, why))
    if not (large("statistics") or large("gradient bias")):
        why = (
            "Clients differ no more than by chance." if not reasons else "The batch-norm statistics do not differ between clients."
        )
        return Advice(FINE, "fedavg", "fedbn", (*reasons, why))
    if large("label skew") and not large("domains"):
        why = "Labels differ but images do not, so frozen statistics of all clients fit every client."
        return Advice("batch norm will hurt towards the end", "fixbn", "fedavg + group_norm", (*reasons, why))
    if large("sampling"):
        why = "Local batch norm would be stale when a client takes part again, so no state is kept at clients."
        return Advice("batch norm will hurt", "fedwon", "fedavg + group_norm", (*reasons, why))
    why = "Every client takes part often enough to keep its batch norm local."
    # The regulariser of gPerXAN needs class labels, like the label skew.
    return Advice("shared batch norm will hurt", "fedbn", "gperxan" if "label skew" in found else "perxan", (*reasons, why))
