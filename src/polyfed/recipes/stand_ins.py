"""Blank images in the place of data that are not there, with the classes, domains and sizes that are known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.data.federation import ClientData, DataSet, Domain, Federation
from polyfed.text import read_call

if TYPE_CHECKING:
    from polyfed.data.parts import Facts
    from polyfed.registry import Recorded

USUAL_EXAMPLES = 1000
SIDES = {"digits_five": 28}
USUAL_SIDE = 32
PIXEL = (3, 1, 1)


@dataclass(frozen=True, eq=False)
class Blank:
    """Examples that are all zero; only their labels are kept."""

    y: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8

    @property
    def labels(self) -> Tensor:
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        y = self.y[indices]
        return torch.zeros(len(y), *self.shape, dtype=self.dtype), y

    def subset(self, indices: Tensor) -> Blank:
        return Blank(self.y[indices], self.shape, self.dtype)


def blank_data(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> DataSet:
    """All domains with as many training examples as they are known to have, each of one pixel: enough to be dealt."""
    facts: Facts = record.extra["facts"]
    count = len(facts.classes)
    domains = [
        Domain(name, Blank(torch.arange(training_size(facts, name, data)) % count, PIXEL), Blank(torch.arange(count), PIXEL))
        for name in dict.fromkeys([*facts.domains, *unseen])
    ]
    return DataSet(record.name, facts.classes, tuple(domains))


def blank_federation(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> Federation:
    """A client for each domain with one image of each class, as large as the run's: enough to try a model."""
    facts: Facts = record.extra["facts"]
    side = side_of(data, record)
    examples = Blank(torch.arange(len(facts.classes)), (3, side, side))
    clients = [ClientData(name, (name,), examples, {name: examples}) for name in facts.domains if name not in unseen]
    return Federation(record.name, facts.classes, tuple(clients))


def training_size(facts: Facts, domain: str, data: str) -> int:
    """The training examples of a domain: as known, or as few as the text asks for."""
    known = [counts for domains in facts.expected.values() for name, counts in domains.items() if name == domain]
    totals = [
        total if isinstance(total, int) else sum(total) for counts in known for key, total in counts.items() if key == "train"
    ]
    most = max(totals, default=USUAL_EXAMPLES)
    asked = read_call(data).named.get("per_domain", 0)
    return min(most, asked) if isinstance(asked, int) and asked else most


def side_of(data: str, record: Recorded[DataSet]) -> int:
    """The side of an image: the data set's own, or what the text asks for."""
    parameters = record.signature.parameters
    usual = parameters["size"].default if "size" in parameters else SIDES.get(record.name, USUAL_SIDE)
    asked = read_call(data).named.get("size", usual)
    return asked if isinstance(asked, int) and asked > 0 else USUAL_SIDE
