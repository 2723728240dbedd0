"""Findings: a number, what it is on known federations, and one sentence each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.studies.doctor.known import APART, BIAS, DOMAINS, KNOWN, LABELS, NAMED, SELDOM, SHIFT, TINY_BATCH
from polyfed.studies.doctor.measures import Measures

NO_CLASS = "examples of this task have no class each"


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
        """The finding as JSON."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "is_large": self.is_large,
            "sentence": self.sentence,
            "known": self.known,
            "details": dict(self.details),
        }


def ratio(value: float, by_chance: float) -> float:
    """A number in multiples of what chance gives; 1 where chance explains all."""
    return value / by_chance if by_chance > 0 else 1.0 if value <= 0 else math.inf


def clients_apart(measures: Measures) -> list[str]:
    """Clients whose statistics lie far from those of the others, farthest first."""
    shift = measures.shift
    if len(shift) < 3:
        return []
    usual = max(statistics.median(shift.values()), measures.shift_by_chance)
    return sorted(
        (one for one, value in shift.items() if value > APART * usual and ratio(value, measures.shift_by_chance) > NAMED),
        key=lambda one: -shift[one],
    )


def findings(measures: Measures) -> list[Finding]:
    """Everything that was found, in the order in which it is told."""
    missing = left_out(measures)
    about_norm = {"statistics": statistics_finding, "gradient bias": bias_finding} if measures.batch_norms else {}
    about_data = {"label skew": label_finding, "domains": domain_finding}
    others = {"smallest batch": batch_finding, "sampling": sampling_finding, "model": size_finding}
    return [make(measures) for name, make in {**about_norm, **about_data, **others}.items() if name not in missing]


def left_out(measures: Measures) -> dict[str, str]:
    """Return the findings that this task cannot have, each with the reason."""
    return dict.fromkeys(("label skew", "domains"), NO_CLASS) if math.isnan(measures.label_skew) else {}


def statistics_finding(measures: Measures) -> Finding:
    """Distance of clients' batch-norm statistics."""
    value = ratio(statistics.fmean(measures.shift.values()), measures.shift_by_chance)
    apart = clients_apart(measures)
    if apart:
        named = ", ".join(apart)
        sentence = f"{named} {'differs' if len(apart) == 1 else 'differ'} from the others in what batch norm sees."
    elif value > SHIFT:
        sentence = "Clients differ from each other in what batch norm sees; none stands out."
    else:
        sentence = "Clients look alike to batch norm."
    details = {"by_client": dict(measures.shift), "by_layer": dict(measures.shift_by_layer), "apart": apart}
    return Finding("statistics", value, "times chance", value > SHIFT or bool(apart), sentence, details)


def bias_finding(measures: Measures) -> Finding:
    """Bias of the averaged gradient."""
    value = ratio(measures.bias, measures.bias_by_chance)
    best = min(measures.other_bias, key=lambda norm: measures.other_bias[norm])
    against = f"{100 * measures.bias:.0f} % of the pooled gradient, {100 * measures.bias_by_chance:.0f} % by chance"
    if value > BIAS:
        sentence = f"With batch norm the clients' mean gradient is off ({against}); with {best} it is not."
    else:
        sentence = f"Batch norm's gradient is about as far off as batches of this size make it ({against})."
    details = {"batch norm": measures.bias, "by chance": measures.bias_by_chance, **measures.other_bias}
    return Finding("gradient bias", value, "times chance", value > BIAS, sentence, details)


def label_finding(measures: Measures) -> Finding:
    """Label skew."""
    value = measures.label_skew
    sentence = f"{100 * value:.0f} % of a client's labels would have to change for everybody's mix."
    return Finding("label skew", value, "share", value > LABELS, sentence)


def domain_finding(measures: Measures) -> Finding:
    """Distance of domains in feature space."""
    if math.isnan(measures.domains):
        return Finding("domains", math.nan, "times chance", False, "No class has enough images at two clients to compare.")
    value = ratio(measures.domains, measures.domains_by_chance)
    large = value > DOMAINS
    sentence = "Images of one class look different at different clients." if large else "Images of one class look alike everywhere."
    return Finding("domains", value, "times chance", large, sentence)


def batch_finding(measures: Measures) -> Finding:
    """The smallest batch."""
    value = measures.smallest_batch
    large = measures.batch_size <= TINY_BATCH
    words = {
        True: "too small for statistics of a batch",
        False: "a last, smaller batch" if value < measures.batch_size else "large enough",
    }
    sentence = f"Batches hold {measures.batch_size} images, the smallest {value}: {words[large]}."
    return Finding("smallest batch", value, "images", large, sentence)


def sampling_finding(measures: Measures) -> Finding:
    """How often a client takes part."""
    value = measures.sampled / measures.clients
    seldom = value < SELDOM
    often = f"{measures.sampled} of {measures.clients} clients take part in a round"
    sentence = (
        f"{often}: what a client keeps is {1 / value:.0f} rounds old on average." if seldom else f"{often}: they can keep state."
    )
    return Finding("sampling", value, "share of clients", seldom, sentence)


def size_finding(measures: Measures) -> Finding:
    """Memory and traffic."""
    megabytes = measures.entries / 1e6
    sentence = (
        f"The model has {measures.parameters:,} parameters: {megabytes:.2f} MB to and from a client in a round, "
        f"{3 * megabytes:.1f} MB at least to train it (weights, gradients, one copy), activations apart."
    )
    return Finding("model", megabytes, "MB", False, sentence)
