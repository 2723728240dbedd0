"""Descriptions of themselves with which nodes are left out, each with a piece of the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyfed.flower.wire.descriptions import MAX_SAMPLES

Change = Callable[[dict[str, Any]], dict[str, Any]]

ODD_NODES: dict[str, tuple[Change, str]] = {
    "another class list": (lambda told: told | {"classes": ["x", *told["classes"][1:]]}, "All nodes need the same classes"),
    "zero samples": (lambda told: told | {"class_counts": [0] * len(told["classes"]), "samples": 0}, "it has no training examples"),
    "counts of 1e12": (lambda told: told | {"class_counts": [10**12] * len(told["classes"])}, "class_counts must be counts from 0"),
    "counts that add up": (lambda told: told | {"class_counts": [MAX_SAMPLES] * len(told["classes"])}, "add up to"),
    "more samples than counts": (lambda told: told | {"samples": told["samples"] + 1}, "add up to"),
    "no task": (lambda told: told | {"task": "guessing"}, "unknown task"),
    "another task": (lambda told: told | {"task": "regression"}, "regression has no classes"),
    "too few counts": (lambda told: told | {"class_counts": [1]}, "1 class_counts for"),
    "a negative count": (lambda told: told | {"class_counts": [-1] * len(told["classes"])}, "class_counts must be counts"),
    "an input of another shape": (lambda told: told | {"input_shape": [3, 99, 99]}, "All nodes need the same"),
    "a huge input": (lambda told: told | {"input_shape": [10**6, 10**6]}, "empty or too large"),
    "no versions": (lambda told: {key: value for key, value in told.items() if key != "versions"}, "has no versions"),
    "another polyfed": (
        lambda told: told | {"versions": told["versions"] | {"polyfed": "9.9"}},
        "its versions differ: polyfed 9.9",
    ),
    "another protocol": (lambda told: told | {"versions": told["versions"] | {"protocol": "1"}}, "its versions differ: protocol 1"),
    "text for a list": (lambda told: told | {"domains": "small"}, "domains must be a list"),
    "a list for a name": (lambda told: told | {"client": ["small"]}, "client must be text"),
    "a name of nothing": (lambda told: told | {"client": "\x1b\x00"}, "client is empty"),
    "an endless name": (lambda told: told | {"client": "x" * 10_000}, "client must be text of at most 200 characters"),
    "a mean that is no number": (lambda told: told | {"mean": [float("nan")], "std": [1.0]}, "mean must be numbers"),
    "a deviation of zero": (lambda told: told | {"mean": [0.0], "std": [0.0]}, "std must have a positive number"),
    "ranges that are no numbers": (
        lambda told: told | {"deep_ranges": {"small": {"integers": ["x", 1]}}},
        "a range must have a black and a white value",
    ),
    "an unknown type": (lambda told: told | {"input_type": "object"}, "unknown input_type"),
    "no table": (lambda told: [told], "its description is not a table"),  # type: ignore[dict-item,return-value]
}
