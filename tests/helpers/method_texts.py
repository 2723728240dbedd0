"""Methods as they train on the tiny model, which has batch norm."""

from __future__ import annotations

WITHOUT_BATCH_NORM = {"dp_sgd": "fedavg + dp_sgd(epsilon=8.0) + group_norm(groups=2)"}
"""Methods that need a model without batch norm, each with a part that replaces it."""


def as_trained(name: str) -> str:
    """The text of a method that trains on a model with batch norm."""
    return WITHOUT_BATCH_NORM.get(name, name)
