"""A federation without its data: names, numbers and shapes.

A run recognises its data by a summary (the table ``[data]`` of ``run.toml``) and rebuilds its model from one where no image is (the table
``[outline]``). The server of a deployment makes its federation from what nodes report.
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

from polyfed.core.data_types import ClientData, Federation, Preparation
from polyfed.data.store.examples import BlankExamples
from polyfed.errors import DataError
from polyfed.tasks.known import CLASSIFICATION, task_named
from polyfed.tasks.task import Task

LISTED_CLIENTS = 100
"""Up to this number of clients, the samples of each are recorded; of more only their digest."""
NAMED_DIFFERENCES = 3
COUNTED = {"clients": "clients", "training_samples": "training samples", "classes": "classes"}
MAX_SAMPLES = 10**9
INPUT_TYPES = {
    name: getattr(torch, name) for name in ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


def input_type(x: Tensor) -> str:
    """Return the name of the type of raw inputs."""
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ClientSummary:
    """A client without its data: how many examples it has for what."""

    id: str
    domains: tuple[str, ...]
    samples: int
    tests: Mapping[str, int] = field(default_factory=dict)
    validation: int | None = None
    class_counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class FederationSummary:
    """A federation without its data.

    Args:
        name: The name of the data.
        task: What is learned.
        classes: The names of the classes.
        clients: The clients.
        input_shape: The shape of one raw input.
        input_type: The type of raw inputs, by its name.
        preparation: How inputs are normalised.
        default_model: The model that runs use if none is named.
        source: Which files and splits were used.
        test_sizes: Numbers of test examples by view and domain.
    """

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
        """Summarise a federation."""
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
        """The shape and the normalisation of inputs."""
        mean, std = (tuple(map(float, values)) for values in (self.preparation.mean, self.preparation.std))
        return RecordedInputs(self.input_shape, mean, std)

    def identity(self) -> dict[str, Any]:
        """Return the facts by which data is recognised, as plain values."""
        samples = {client.id: client.samples for client in sorted(self.clients, key=lambda client: client.id)}
        sizes = {client.id: [client.samples, client.validation, client.tests] for client in self.clients}
        named = json.dumps([self.classes, sizes, self.test_sizes["unseen"]], sort_keys=True)
        return {
            "name": self.name,
            "source": self.source,
            "classes": len(self.classes),
            "clients": len(samples),
            "training_samples": sum(samples.values()),
            "unseen": sorted(self.test_sizes["unseen"]),
            "test_sizes": self.test_sizes,
            "digest": hashlib.sha256(named.encode()).hexdigest(),
            **self.inputs.as_plain(),
            **({"samples": samples} if len(samples) <= LISTED_CLIENTS else {}),
        }

    def outline(self) -> dict[str, Any]:
        """Return what ``from_outline`` needs, as plain values; empty if inputs are prepared in a way that has no plain values."""
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
            "clients": [client.id for client in self.clients],
            "domains": [list(client.domains) for client in self.clients],
            "samples": [client.samples for client in self.clients],
        }

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any], name: str) -> FederationSummary:
        """Read an outline; anything may be raised for a damaged one. It does not say what clients are tested on."""
        samples = outline["samples"]
        if sum(samples) > MAX_SAMPLES:
            raise ValueError(f"{sum(samples):,} samples, expected at most {MAX_SAMPLES:,}")
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
            ),
            default_model=outline["default_model"],
        )

    def federation(self) -> Federation:
        """Return the federation with blank inputs instead of its data."""

        def blank(count: int, class_counts: Sequence[int] = ()) -> BlankExamples:
            targets = self.task.blank_targets(count, class_counts, len(self.classes), self.input_shape)
            return BlankExamples(targets, self.input_shape, INPUT_TYPES[self.input_type])

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
    """The shape of one raw input, and the mean and spread by which channels are normalised.

    A run that is opened again takes them from its record: a later polyfed, or a later library, may read and normalise images in
    another way, and what was trained stays what it was.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, federation: Federation) -> RecordedInputs:
        """Return the inputs of a federation."""
        return FederationSummary.of(federation).inputs

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RecordedInputs | None:
        """Return what a table says of inputs; None if it says nothing of them."""
        if not {"input_shape", "mean", "std"} <= values.keys():
            return None
        shape, mean, std = (values[name] for name in ("input_shape", "mean", "std"))
        return cls(tuple(map(int, shape)), tuple(map(float, mean)), tuple(map(float, std)))

    def as_plain(self) -> dict[str, Any]:
        """Return the inputs as plain values, by the names under which they are written down."""
        return {"input_shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}

    def put_into(self, federation: Federation) -> Federation:
        """Return the federation with inputs normalised as they were; inputs of another shape are rejected."""
        found = RecordedInputs.of(federation).shape
        if found != self.shape:
            raise DataError(
                f"The run was trained on inputs of {_shape_words(self.shape)}, and {federation.name} now has inputs of {_shape_words(found)}. "
                "Give the run its own data again, or score it on other data, which are resized (polyfed evaluate RUN DATA)."
            )
        return dataclasses.replace(
            federation, preparation=dataclasses.replace(federation.preparation, mean=self.mean, std=self.std)
        )


def _shape_words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the data of now differ from those a run was started with, in words; a new name alone is no difference."""
    changed = {key for key in then if key != "name" and then[key] != now.get(key)}
    found = _between_clients(then["samples"], now.get("samples", {})) if "samples" in changed and "samples" in now else []
    found = found or [f"{now[key]} {words} instead of {then[key]}" for key, words in COUNTED.items() if key in changed]
    if "unseen" in changed:
        found.append(f"unseen are {', '.join(now['unseen']) or 'none'} instead of {', '.join(then['unseen']) or 'none'}")
    if "input_shape" in changed:
        found.append(f"inputs are {_shape_words(now['input_shape'])} instead of {_shape_words(then['input_shape'])}")
    for key in ("mean", "std"):
        if key in changed:
            found.append(f"channels are normalised by the {key} {now[key]} instead of {then[key]}")
    if not found and "source" in changed:
        found.append(f"they are {now['source']!r} instead of {then['source']!r}")
    if not found and "digest" in changed:
        found.append("the names of classes, or the sizes of validation or test parts, are others")
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
