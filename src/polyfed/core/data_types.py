"""Data types: examples, domains, data sets, clients, federations.

A *data set* is a list of domains, each with train, validation and test examples. A *partition* splits the domains across clients. The result
is a *federation*: clients that train, and unseen domains that are held out. Images stay ``uint8`` until a batch is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from polyfed.errors import DataError, nearest
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.task import WHOLE, Task

Augmentation: TypeAlias = Callable[[Tensor], Tensor]
PairAugmentation: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
DeepRange: TypeAlias = tuple[float, float]
"""Pixel values that are mapped to black and to white, for images with more than 8 bits."""
DeepRanges: TypeAlias = Mapping[str, Mapping[str, DeepRange]]
"""Ranges by domain and number type (integers, floats)."""

NAMED_CLIENTS = 5
SHOWN_CLIENTS = 12


@runtime_checkable
class Examples(Protocol):
    """Inputs with targets that can be read in batches."""

    @property
    def labels(self) -> Tensor:
        """All targets. Classification: int64, shape (n,). Other tasks: as the task defines them."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the raw inputs and targets at these positions."""

    def subset(self, indices: Tensor) -> Examples:
        """Return the examples at these positions, in this order."""


def as_targets(y: Tensor) -> Tensor:
    """Convert class labels to int64. Other targets are returned unchanged."""
    return y.to(torch.int64) if y.dim() == 1 and y.dtype in WHOLE else y


@dataclass(frozen=True, eq=False)
class ArrayExamples:
    """Examples as two tensors: ``x`` (n, channels, height, width), usually uint8, and ``y`` (n,), or the shape of the task."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels: each input needs one label.")
        object.__setattr__(self, "y", as_targets(self.y))

    @property
    def labels(self) -> Tensor:
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]

    def subset(self, indices: Tensor) -> ArrayExamples:
        return ArrayExamples(self.x[indices], self.y[indices])


@dataclass(frozen=True, eq=False)
class DatasetExamples:
    """Examples of a map-style torch data set of (input, target) pairs, loaded item by item."""

    dataset: Any
    positions: Tensor | None = None
    known_labels: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        if self.known_labels is None:
            found = _stacked([self.dataset[position][1] for position in self._order().tolist()])
            object.__setattr__(self, "known_labels", found)
        assert self.known_labels is not None
        return self.known_labels

    def __len__(self) -> int:
        return len(self.dataset) if self.positions is None else len(self.positions)

    def _order(self) -> Tensor:
        return torch.arange(len(self.dataset)) if self.positions is None else self.positions

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        items = [self.dataset[position] for position in self._order()[indices].tolist()]
        inputs = torch.stack([torch.as_tensor(item[0]) for item in items])
        return inputs, _stacked([item[1] for item in items])

    def subset(self, indices: Tensor) -> DatasetExamples:
        known = None if self.known_labels is None else self.known_labels[indices]
        return DatasetExamples(self.dataset, self._order()[indices], known)


def _stacked(targets: Sequence[Any]) -> Tensor:
    if not targets:
        return torch.zeros(0, dtype=torch.int64)
    try:
        return as_targets(torch.stack([torch.as_tensor(target) for target in targets]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The targets of examples cannot be stacked: {error}. Use numbers, or tensors of one shape.") from error


def joined(parts: Sequence[Examples]) -> Examples:
    """Concatenate sets of examples. Those stored on disk stay there if they implement ``joined_with``."""
    if len(parts) == 1:
        return parts[0]
    join = getattr(parts[0], "joined_with", None)
    together: Examples | None = None if join is None else join(parts[1:])
    if together is not None:
        return together
    pairs = [part.batch(slice(None)) for part in parts]
    return ArrayExamples(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a text table, with right-aligned numbers."""
    cells = [list(map(str, heads)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(heads))]
    numeric = [bool(rows) and isinstance(rows[0][place], int) for place in range(len(heads))]
    return [
        "  ".join(t.rjust(w) if n else t.ljust(w) for t, w, n in zip(line, widths, numeric, strict=True)).rstrip() for line in cells
    ]


@dataclass(frozen=True)
class Preparation:
    """Preprocessing of raw batches: augment (training only), scale to [0, 1], normalise.

    Attributes:
        mean: Mean per channel.
        std: Standard deviation per channel.
        augment: Augments a uint8 batch with *per-sample* random choices from torch's default generator, which the client seeds.
        augment_pairs: Augments inputs and targets together, before ``augment`` (random crops of an image and its mask).
        middle_square: Image files are cropped to the central square before resizing; otherwise the aspect ratio is ignored.
        deep_ranges: Pixel values that are mapped to black and to white, for image files with more than 8 bits.
    """

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    augment: Augmentation | None = None
    augment_pairs: PairAugmentation | None = None
    middle_square: bool = False
    deep_ranges: DeepRanges = field(default_factory=dict, hash=False)

    def pair_for_training(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Preprocess a training batch with its targets."""
        if self.augment_pairs is not None:
            x, y = self.augment_pairs(x, y)
        return self.for_training(x), y

    def for_training(self, x: Tensor) -> Tensor:
        """Preprocess a training batch."""
        return self.for_testing(self.augment(x) if self.augment is not None else x)

    def for_testing(self, x: Tensor) -> Tensor:
        """Preprocess a batch without augmentation. Floating-point inputs are returned unchanged."""
        if x.dtype != torch.uint8:
            return x
        if len(set(self.mean)) == len(set(self.std)) == 1:
            return x.to(torch.float32).mul_(1 / (255 * self.std[0])).sub_(self.mean[0] / self.std[0])
        scale, shift = (values.to(x.device) for values in self._scale_and_shift)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return x.to(torch.float32).mul_(scale.view(shape)).sub_(shift.view(shape))

    @cached_property
    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        std = torch.tensor(self.std)
        return 1 / (255 * std), torch.tensor(self.mean) / std


@dataclass(frozen=True)
class Domain:
    """One domain of a data set. ``groups`` contains natural ids (patients, writers) of training examples.

    ``deep_ranges`` maps the number types of its images with more than 8 bits to their black and white values.
    """

    name: str
    train: Examples
    test: Examples
    validation: Examples | None = None
    groups: Tensor | None = None
    deep_ranges: Mapping[str, DeepRange] = field(default_factory=dict)


def describe_classes(data: DataSet | Federation) -> str:
    """Describe the number of classes, labels or outputs, and the task if it is not classification."""
    count, noun = len(data.classes), data.task.noun
    plural = noun if count == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {plural}" + ("" if data.task is CLASSIFICATION else f", {data.task.name}")


@dataclass(frozen=True)
class TrainsWith:
    """Default training settings of a data set or a model, from its paper."""

    lr: float
    optimizer: str = "sgd"
    batch_size: int = 32


@dataclass(frozen=True, repr=False)
class DataSet:
    """Domains with the same classes.

    ``source`` describes the files and splits, for tables. ``notes`` are printed before training. ``trains_with`` are the default training
    settings.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    preparation: Preparation = field(default_factory=Preparation)
    default_model: str = "small_cnn"
    source: str = ""
    notes: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    trains_with: TrainsWith | None = None

    def __repr__(self) -> str:
        rows = [(d.name, len(d.train), 0 if d.validation is None else len(d.validation), len(d.test)) for d in self.domains]
        head = f"<DataSet {self.name}: {len(self.domains)} domains, {describe_classes(self)}>"
        return "\n".join([head, *_table(("domain", "train", "validation", "test"), rows)])

    def domain(self, name: str) -> Domain:
        """Return a domain by name."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        raise DataError(f"{self.name} has no domain {name!r}. {nearest(name, [d.name for d in self.domains])}")


@dataclass(frozen=True)
class ClientData:
    """Data of one client. ``tests`` maps domains to test sets; usually there is one."""

    id: str
    domains: tuple[str, ...]
    train: Examples
    tests: Mapping[str, Examples]
    validation: Examples | None = None


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients that train, and unseen domains that are held out of training."""

    name: str
    classes: tuple[str, ...]
    clients: tuple[ClientData, ...]
    unseen: Mapping[str, Examples] = field(default_factory=dict)
    preparation: Preparation = field(default_factory=Preparation)
    default_model: str = "small_cnn"
    source: str = ""
    notes: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    trains_with: TrainsWith | None = None
    trusts_default_model: bool = False
    """True if this process chose the default model, so that its function may be called; False if a file or a node chose it."""

    def __post_init__(self) -> None:
        ids = [client.id for client in self.clients]
        if not ids:
            raise DataError(f"{self.name}: there are no clients to train. Leave at least one domain seen.")
        if len(set(ids)) != len(ids):
            raise DataError(
                f"{self.name}: client ids must be unique; duplicated: {sorted(i for i in set(ids) if ids.count(i) > 1)}."
            )
        empty = [client.id for client in self.clients if len(client.train) == 0]
        if empty:
            raise DataError(
                f"{self.name}: these clients have no training data: {', '.join(empty)}. Use fewer clients or a different partition, "
                "or hold out their domains (--unseen NAME)."
            )

    def __repr__(self) -> str:
        rows = [
            (
                c.id,
                "+".join(c.domains),
                len(c.train),
                0 if c.validation is None else len(c.validation),
                sum(map(len, c.tests.values())),
            )
            for c in self.clients[:SHOWN_CLIENTS]
        ]
        more = [f"and {len(self.clients) - SHOWN_CLIENTS} more clients"] if len(self.clients) > SHOWN_CLIENTS else []
        unseen = (
            [f"unseen: {', '.join(f'{name} ({len(examples)})' for name, examples in self.unseen.items())}"] if self.unseen else []
        )
        head = f"<Federation {self.name}: {len(self.clients)} clients, {describe_classes(self)}>"
        return "\n".join([head, *_table(("client", "domain", "train", "validation", "test"), rows), *more, *unseen])

    def sample_input(self) -> Tensor:
        """Return a preprocessed batch of at most two inputs, for tracing a model."""
        train = self.clients[0].train
        x, _ = train.batch(slice(0, min(2, len(train))))
        return self.preparation.for_testing(x)

    def without_validation(self) -> str:
        """Describe the clients without validation data; empty if all have some."""
        lacking = [client.id for client in self.clients if client.validation is None or not len(client.validation)]
        if not lacking:
            return ""
        more = f" and {len(lacking) - NAMED_CLIENTS} more" if len(lacking) > NAMED_CLIENTS else ""
        shown = ", ".join(lacking[:NAMED_CLIENTS]) + more
        return f"{len(lacking)} of {len(self.clients)} clients of {self.name} have none ({shown})"

    def tests(self, clients: Collection[str] | None = None) -> dict[str, list[Examples]]:
        """Return the test sets by seen domain, optionally restricted to some clients. Shared test sets occur once."""
        found: dict[str, dict[int, Examples]] = {}
        for client in self.clients if clients is None else (client for client in self.clients if client.id in clients):
            for domain, examples in client.tests.items():
                found.setdefault(domain, {})[id(examples)] = examples
        return {domain: list(examples.values()) for domain, examples in found.items()}

    def test_sizes(self, clients: Collection[str] | None = None) -> dict[str, dict[str, int]]:
        """Return the number of test examples by view and domain. ``clients`` restricts the seen domains."""
        return {
            "seen": {domain: sum(map(len, parts)) for domain, parts in self.tests(clients).items()},
            "unseen": {domain: len(examples) for domain, examples in self.unseen.items()},
        }

    def pooled(self) -> Federation:
        """Return the same data with all training examples at one client, and test sets by domain."""
        tests = self.tests()
        validations = [client.validation for client in self.clients if client.validation is not None]
        union = ClientData(
            id="pooled",
            domains=tuple(dict.fromkeys([*(domain for client in self.clients for domain in client.domains), *tests])),
            train=joined([client.train for client in self.clients]),
            tests={domain: joined(parts) for domain, parts in tests.items()},
            validation=joined(validations) if validations else None,
        )
        return replace(self, clients=(union,))


def in_batches(examples: Examples, size: int, minimum: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the examples in batches. A last batch smaller than ``minimum`` is merged into the previous one."""
    size, count = max(size, minimum), len(examples)
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < minimum:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        yield examples.batch(slice(start, stop))
