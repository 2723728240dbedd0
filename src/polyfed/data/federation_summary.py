"""Summarise a federation without its data: names, counts and shapes.

A run recognises its data by a summary (the table ``[data]`` of ``run.toml``), and rebuilds its model from a summary if the images are not
available (the table ``[outline]``). The server of a deployment builds its federation from the summaries that nodes report.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import ArrayExamples, ClientData, DeepRanges, Federation, Preparation
from polyfed.data.store.deep_ranges import read_ranges
from polyfed.data.store.examples import blank_examples
from polyfed.errors import DataError
from polyfed.tasks.known import CLASSIFICATION, task_named
from polyfed.tasks.task import Task

LISTED_CLIENTS = 100
"""With more clients than this, only a digest of the sample counts is recorded."""
NAMED_DIFFERENCES = 3
COUNTED = {"clients": "clients", "training_samples": "training samples", "classes": "classes"}
MAX_SAMPLES = 10**9
INPUT_TYPES = {
    name: getattr(torch, name) for name in ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


def input_type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ClientSummary:
    """A client without its data: its numbers of examples."""

    id: str
    domains: tuple[str, ...]
    samples: int
    tests: Mapping[str, int] = field(default_factory=dict)
    validation: int | None = None
    class_counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class FederationSummary:
    """A federation without its data. ``test_sizes`` has the number of test examples by view and domain."""

    name: str
    task: Task
    classes: tuple[str, ...]
    clients: tuple[ClientSummary, ...]
    input_shape: tuple[int, ...]
    input_type: str = "uint8"
    preparation: Preparation = field(default_factory=Preparation)
    default_model: str = "small_cnn"
    source: str = ""
    test_sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, federation: Federation) -> FederationSummary:
        raw, _ = federation.clients[0].train.batch(slice(0, 1))
        return cls(
            name=federation.name,
            task=federation.task,
            classes=federation.classes,
            clients=tuple(
                ClientSummary(
                    id=client.id,
                    domains=client.domains,
                    samples=len(client.train),
                    tests={domain: len(examples) for domain, examples in client.tests.items()},
                    validation=None if client.validation is None else len(client.validation),
                )
                for client in federation.clients
            ),
            input_shape=tuple(raw.shape[1:]),
            input_type=input_type(raw),
            preparation=federation.preparation,
            default_model=federation.default_model,
            source=federation.source,
            test_sizes=federation.test_sizes(),
        )

    @property
    def inputs(self) -> RecordedInputs:
        mean, std = (tuple(map(float, values)) for values in (self.preparation.mean, self.preparation.std))
        return RecordedInputs(self.input_shape, mean, std, self.preparation.deep_ranges)

    def identity(self) -> dict[str, Any]:
        """Return the facts that identify the data, as plain values."""
        samples = {client.id: client.samples for client in sorted(self.clients, key=lambda client: client.id)}
        sizes = {client.id: [client.samples, client.validation, client.tests] for client in self.clients}
        described = json.dumps([self.classes, sizes, self.test_sizes["unseen"]], sort_keys=True)
        return {
            "name": self.name,
            "source": self.source,
            "classes": len(self.classes),
            "clients": len(samples),
            "training_samples": sum(samples.values()),
            "unseen": sorted(self.test_sizes["unseen"]),
            "test_sizes": self.test_sizes,
            "digest": hashlib.sha256(described.encode()).hexdigest(),
            **self.inputs.as_plain(),
            **({"samples": samples} if len(samples) <= LISTED_CLIENTS else {}),
        }

    def outline(self) -> dict[str, Any]:
        """Return the plain values that ``from_outline`` needs. Empty if the preparation cannot be expressed as plain values."""
        prepared = self.preparation
        if type(prepared) is not Preparation or self.input_type not in INPUT_TYPES:
            return {}
        return {
            "task": self.task.name,
            "class_names": list(self.classes),
            "default_model": self.default_model,
            "input_shape": list(self.input_shape),
            "input_type": self.input_type,
            "mean": list(prepared.mean),
            "std": list(prepared.std),
            "middle_square": prepared.middle_square,
            **({"deep_ranges": prepared.deep_ranges} if prepared.deep_ranges else {}),
            "clients": [client.id for client in self.clients],
            "domains": [list(client.domains) for client in self.clients],
            "samples": [client.samples for client in self.clients],
        }

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any], name: str) -> FederationSummary:
        """Read an outline, which has no test sizes. A damaged outline may raise any exception."""
        samples = outline["samples"]
        if sum(samples) > MAX_SAMPLES:
            raise ValueError(f"{sum(samples):,} samples; at most {MAX_SAMPLES:,} are allowed")
        return cls(
            name=name,
            task=task_named(outline.get("task", CLASSIFICATION.name)),
            classes=tuple(outline["class_names"]),
            clients=tuple(
                ClientSummary(client, tuple(outline["domains"][place]), samples[place])
                for place, client in enumerate(outline["clients"])
            ),
            input_shape=tuple(outline["input_shape"]),
            input_type=outline["input_type"],
            preparation=Preparation(
                tuple(map(float, outline["mean"])),
                tuple(map(float, outline["std"])),
                middle_square=bool(outline.get("middle_square")),
                deep_ranges=read_ranges(outline.get("deep_ranges", {})),
            ),
            default_model=outline["default_model"],
        )

    def federation(self) -> Federation:
        """Return a federation with blank inputs instead of data."""

        def blank(count: int, class_counts: Sequence[int] = ()) -> ArrayExamples:
            targets = self.task.blank_targets(count, class_counts, len(self.classes), self.input_shape)
            return blank_examples(targets, self.input_shape, INPUT_TYPES[self.input_type])

        return Federation(
            name=self.name,
            classes=self.classes,
            clients=tuple(
                ClientData(
                    id=client.id,
                    domains=client.domains,
                    train=blank(client.samples, client.class_counts),
                    tests={domain: blank(count) for domain, count in client.tests.items()},
                    validation=None if client.validation is None else blank(client.validation),
                )
                for client in self.clients
            ),
            preparation=self.preparation,
            default_model=self.default_model,
            task=self.task,
            source=self.source,
        )


@dataclass(frozen=True)
class RecordedInputs:
    """Shape of one raw input, the mean and standard deviation that normalise its channels, and the ranges of deep images.

    A reopened run uses the recorded values, because a later version of polyfed or of a library may read or normalise images differently,
    and because added images may change the range that is measured.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    deep_ranges: DeepRanges = field(default_factory=dict)

    @classmethod
    def of(cls, federation: Federation) -> RecordedInputs:
        return FederationSummary.of(federation).inputs

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RecordedInputs | None:
        """Read the inputs from a table. Return None if it does not describe them."""
        if not {"input_shape", "mean", "std"} <= values.keys():
            return None
        shape, mean, std = (values[name] for name in ("input_shape", "mean", "std"))
        return cls(
            tuple(map(int, shape)), tuple(map(float, mean)), tuple(map(float, std)), read_ranges(values.get("deep_ranges", {}))
        )

    def as_plain(self) -> dict[str, Any]:
        return {"input_shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}

    def put_into(self, federation: Federation) -> Federation:
        """Return the federation with the recorded normalisation. Reject inputs of a different shape."""
        found = RecordedInputs.of(federation).shape
        if found != self.shape:
            raise DataError(
                f"The run was trained on inputs of {_shape_text(self.shape)}, but {federation.name} now has inputs of {_shape_text(found)}. "
                "Restore the original data, or pass other data, which is resized automatically (polyfed evaluate RUN DATA)."
            )
        return dataclasses.replace(
            federation, preparation=dataclasses.replace(federation.preparation, mean=self.mean, std=self.std)
        )


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how the data differs from the data at the start of the run. The name of the data is not compared."""
    changed = {key for key in then if key != "name" and then[key] != now.get(key)}
    found = _between_clients(then["samples"], now.get("samples", {})) if "samples" in changed and "samples" in now else []
    found = found or [f"{now[key]} {label} instead of {then[key]}" for key, label in COUNTED.items() if key in changed]
    if "unseen" in changed:
        found.append(f"unseen domains are {', '.join(now['unseen']) or 'none'} instead of {', '.join(then['unseen']) or 'none'}")
    if "input_shape" in changed:
        found.append(f"inputs are {_shape_text(now['input_shape'])} instead of {_shape_text(then['input_shape'])}")
    for key in ("mean", "std"):
        if key in changed:
            found.append(f"channels are normalised with the {key} {now[key]} instead of {then[key]}")
    if not found and "source" in changed:
        found.append(f"the source is {now['source']!r} instead of {then['source']!r}")
    if not found and "digest" in changed:
        found.append("the class names, or the sizes of validation or test splits, have changed")
    return found


def _between_clients(then: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    found = [f"client {client} with {count} training samples is missing" for client, count in then.items() if client not in now]
    found += [f"client {client} is new" for client in now if client not in then]
    found += [
        f"client {client} has {now[client]} training samples instead of {count}"
        for client, count in then.items()
        if client in now and now[client] != count
    ]
    more = len(found) - NAMED_DIFFERENCES
    return found[:NAMED_DIFFERENCES] + ([f"and {more} more differences"] if more > 0 else [])
