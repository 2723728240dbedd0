"""Findings: a number, the same number on known federations, and one sentence each; and the method that they lead to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.studies.doctor.measures import Measures

FINE = "batch norm is fine"
_NO_CLASS = "examples of this task have no class each"
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
"""The findings' numbers on known federations, all of them without sampling.

Measured with ``polyfed doctor NAME --json`` (``docs/doctor.md`` has the commands). The limits below were set on digits-mini, on partitions
of CIFAR-10 and on shifts made in code, before any other data set was looked at.
"""

_TINY_BATCH = 4
"""Batches up to this size have statistics that say little."""
_SELDOM = 0.5
"""Clients that take part in a smaller share of rounds keep state that ages."""
_BIAS = 1.25
"""Bias of batch norm in multiples of what chance gives, from which on clients' batches are too different."""
_SHIFT = 1.25
"""Distance of statistics in multiples of what chance gives, from which on clients differ."""
_NAMED = 2.0
"""A client is named where its distance is so many times what chance gives,"""
_APART = 1.5
"""and so many times the median one."""
_DOMAINS = 1.25
"""Distance in feature space in multiples of what chance gives, from which on clients are different domains."""
_LABELS = 0.3
"""Total variation of labels, from which on they are skewed."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        name: what was looked at.
        value: the number.
        unit: what the number is in.
        is_large: whether it speaks against batch norm, or for a remedy.
        sentence: what it means here.
        details: numbers behind it, by client, layer or norm.
    """

    name: str
    value: float
    unit: str
    is_large: bool
    sentence: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, float]:
        """The same number on known federations."""
        return {name: numbers[self.name] for name, numbers in KNOWN.items() if self.name in numbers}

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "is_large": self.is_large,
            "sentence": self.sentence,
            "known": self.known,
            "details": dict(self.details),
        }


def _ratio(value: float, by_chance: float) -> float:
    """A number in multiples of what chance gives; 1 where chance explains all."""
    return value / by_chance if by_chance > 0 else 1.0 if value <= 0 else math.inf


def _clients_apart(measures: Measures) -> list[str]:
    """Clients whose statistics lie far from those of the others, farthest first."""
    shift = measures.shift
    if len(shift) < 3:
        return []
    usual = max(statistics.median(shift.values()), measures.shift_by_chance)
    return sorted(
        (one for one, value in shift.items() if value > _APART * usual and _ratio(value, measures.shift_by_chance) > _NAMED),
        key=lambda one: -shift[one],
    )


def findings(measures: Measures) -> list[Finding]:
    """Everything that was found, in the order in which it is told."""
    missing = left_out(measures)
    about_norm = {"statistics": _statistics_finding, "gradient bias": _bias_finding} if measures.batch_norms else {}
    about_data = {"label skew": _label_finding, "domains": _domain_finding}
    others = {"smallest batch": _batch_finding, "sampling": _sampling_finding, "model": _size_finding}
    return [make(measures) for name, make in {**about_norm, **about_data, **others}.items() if name not in missing]


def left_out(measures: Measures) -> dict[str, str]:
    """Return the findings that this task cannot have, each with the reason."""
    return dict.fromkeys(("label skew", "domains"), _NO_CLASS) if math.isnan(measures.label_skew) else {}


def _statistics_finding(measures: Measures) -> Finding:
    value = _ratio(statistics.fmean(measures.shift.values()), measures.shift_by_chance)
    apart = _clients_apart(measures)
    if apart:
        named = ", ".join(apart)
        sentence = f"{named} {'differs' if len(apart) == 1 else 'differ'} from the others in what batch norm sees."
    elif value > _SHIFT:
        sentence = "Clients differ from each other in what batch norm sees; none stands out."
    else:
        sentence = "Clients look alike to batch norm."
    details = {"by_client": dict(measures.shift), "by_layer": dict(measures.shift_by_layer), "outliers": apart}
    return Finding("statistics", value, "times chance", value > _SHIFT or bool(apart), sentence, details)


def _bias_finding(measures: Measures) -> Finding:
    value = _ratio(measures.bias, measures.bias_by_chance)
    best = min(measures.other_bias, key=lambda norm: measures.other_bias[norm])
    against = f"{100 * measures.bias:.0f} % of the pooled gradient, {100 * measures.bias_by_chance:.0f} % by chance"
    if value > _BIAS:
        sentence = f"With batch norm the clients' mean gradient is off ({against}); with {best} it is not."
    else:
        sentence = f"Batch norm's gradient is about as far off as batches of this size make it ({against})."
    details = {"batch norm": measures.bias, "by chance": measures.bias_by_chance, **measures.other_bias}
    return Finding("gradient bias", value, "times chance", value > _BIAS, sentence, details)


def _label_finding(measures: Measures) -> Finding:
    value = measures.label_skew
    sentence = f"{100 * value:.0f} % of a client's labels would have to change for everybody's mix."
    return Finding("label skew", value, "share", value > _LABELS, sentence)


def _domain_finding(measures: Measures) -> Finding:
    if math.isnan(measures.domains):
        return Finding("domains", math.nan, "times chance", False, "No class has enough images at two clients to compare.")
    value = _ratio(measures.domains, measures.domains_by_chance)
    large = value > _DOMAINS
    sentence = "Images of one class look different at different clients." if large else "Images of one class look alike everywhere."
    return Finding("domains", value, "times chance", large, sentence)


def _batch_finding(measures: Measures) -> Finding:
    value = measures.smallest_batch
    large = measures.batch_size <= _TINY_BATCH
    words = {
        True: "too small for statistics of a batch",
        False: "a last, smaller batch" if value < measures.batch_size else "large enough",
    }
    sentence = f"Batches hold {measures.batch_size} images, the smallest {value}: {words[large]}."
    return Finding("smallest batch", value, "images", large, sentence)


def _sampling_finding(measures: Measures) -> Finding:
    value = measures.sampled / measures.clients
    seldom = value < _SELDOM
    often = f"{measures.sampled} of {measures.clients} clients take part in a round"
    sentence = (
        f"{often}: what a client keeps is {1 / value:.0f} rounds old on average." if seldom else f"{often}: they can keep state."
    )
    return Finding("sampling", value, "share of clients", seldom, sentence)


def _size_finding(measures: Measures) -> Finding:
    megabytes = measures.entries / 1e6
    sentence = (
        f"The model has {measures.parameters:,} parameters: {megabytes:.2f} MB to and from a client in a round, "
        f"{3 * megabytes:.1f} MB at least to train it (weights, gradients, one copy), activations apart."
    )
    return Finding("model", megabytes, "MB", False, sentence)


@dataclass(frozen=True)
class Advice:
    """What to use.

    Attributes:
        verdict: about batch norm, in a few words.
        method: the text of the recommended method.
        runner_up: the text of the next one.
        reasons: a sentence each.
    """

    verdict: str
    method: str
    runner_up: str
    reasons: tuple[str, ...]


def advise(found: Mapping[str, Finding]) -> Advice:
    """The advice that these findings, by their names, lead to."""

    def large(name: str) -> bool:
        return name in found and found[name].is_large

    reasons = tuple(one.sentence for one in found.values() if one.is_large)
    if "statistics" not in found:
        why = "The model has no batch norm, so there is nothing of it to hurt."
        return Advice("the model has no batch norm", "fedavg", "fedavg + fedprox(mu=0.01)", (why, *reasons))
    if large("smallest batch"):
        why = "Statistics of such batches say little; without norms, or with norms of one image, the batch does not matter."
        return Advice("batch norm will hurt", "fedwon", "fedavg + group_norm", (*reasons, why))
    if not (large("statistics") or large("gradient bias")):
        why = (
            "Clients differ no more than chance would make them."
            if not reasons
            else "Batch norm sees no difference between clients."
        )
        return Advice(FINE, "fedavg", "fedbn", (*reasons, why))
    if large("label skew") and not large("domains"):
        why = "Labels differ and images do not, so statistics of all clients suit everybody once they are frozen."
        return Advice("batch norm will hurt towards the end", "fixbn", "fedavg + group_norm", (*reasons, why))
    if large("sampling"):
        why = "Local batch norm would age between two turns of a client, so nothing is kept at clients."
        return Advice("batch norm will hurt", "fedwon", "fedavg + group_norm", (*reasons, why))
    why = "Every client takes part often enough to keep batch norm of its own."
    # gPerXAN's guide needs one class per example. Without classes there is no label skew.
    return Advice("shared batch norm will hurt", "fedbn", "gperxan" if "label skew" in found else "perxan", (*reasons, why))
