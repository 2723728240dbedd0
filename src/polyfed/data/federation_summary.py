"""A summary of a federation without its data: enough to build a run's model again, and to know its clients, where no image is.

A run writes it to the table ``[outline]`` of its ``run.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import ClientData, Examples, Federation, Preparation
from polyfed.core.tasks.known import CLASSIFICATION, task_named
from polyfed.core.tasks.task import Task
from polyfed.data.examples import BlankExamples

MOST_SAMPLES = 10**9
INPUT_TYPES = {
    name: getattr(torch, name) for name in ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


def summary_of(federation: Federation) -> dict[str, Any]:
    """Names, numbers and shapes as plain values, no examples; empty where inputs are prepared in a way that has no plain values."""
    x, _ = federation.clients[0].train.batch(slice(0, 1))
    prepared = federation.preparation
    if type(prepared) is not Preparation or input_type(x) not in INPUT_TYPES:
        return {}
    return {
        "task": federation.task.name,
        "class_names": list(federation.classes),
        "default_model": federation.default_model,
        "input_shape": list(x.shape[1:]),
        "input_type": input_type(x),
        "mean": list(prepared.mean),
        "std": list(prepared.std),
        "middle_square": prepared.middle_square,
        "clients": [client.id for client in federation.clients],
        "domains": [list(client.domains) for client in federation.clients],
        "samples": [len(client.train) for client in federation.clients],
    }


def input_type(x: Tensor) -> str:
    """The type of raw inputs, by its name."""
    return str(x.dtype).removeprefix("torch.")


def federation_from(summary: Mapping[str, Any], name: str) -> Federation:
    """The federation with blank inputs in the place of its data, and without tests."""
    classes = tuple(summary["class_names"])
    task = task_named(summary.get("task", CLASSIFICATION.name))
    if sum(summary["samples"]) > MOST_SAMPLES:
        raise ValueError(f"{sum(summary['samples']):,} samples, expected at most {MOST_SAMPLES:,}")

    def client(place: int) -> ClientData:
        train = _blank(summary["samples"][place], task, classes, summary["input_shape"], summary["input_type"])
        return ClientData(summary["clients"][place], tuple(summary["domains"][place]), train, tests={})

    return Federation(
        name=name,
        classes=classes,
        clients=tuple(client(place) for place in range(len(summary["clients"]))),
        preparation=Preparation(
            tuple(map(float, summary["mean"])), tuple(map(float, summary["std"])), middle_square=bool(summary.get("middle_square"))
        ),
        default_model=summary["default_model"],
        task=task,
    )


def _blank(count: int, task: Task, classes: Sequence[str], shape: Sequence[int], kind: str) -> Examples:
    return BlankExamples(task.blank_targets(count, (), len(classes), shape), tuple(shape), INPUT_TYPES[kind])
