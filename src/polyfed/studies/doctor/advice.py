"""From findings to one method, a runner-up, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyfed.studies.doctor.findings import Finding

FINE = "batch norm is fine"


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
