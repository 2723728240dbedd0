"""Five clients with handwriting of one domain, whose test sets nobody may read."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, Federation
from polyfed.data.registry import data_sets


class Untouchable:
    """Test examples that end the test when anything of them is read."""

    def __len__(self) -> int:
        return 50

    @property
    def labels(self) -> Tensor:
        self.fail()

    def batch(self, indices: object) -> tuple[Tensor, Tensor]:
        self.fail()

    def subset(self, indices: object) -> Untouchable:
        self.fail()

    def fail(self) -> NoReturn:
        raise AssertionError("the doctor read test data")


@functools.cache
def handwriting() -> DataSet:
    data = data_sets.build("digits-mini")
    return replace(data, domains=tuple(replace(domain, test=Untouchable()) for domain in data.domains))


def federation(inverted: int | None) -> Federation:
    """Five clients with handwriting of one domain; one of them may have its colours inverted."""
    x, y = handwriting().domain("pen").train.batch(slice(None))
    clients = []
    for place, part in enumerate(torch.randperm(len(y), generator=torch.Generator().manual_seed(3)).chunk(5)):
        images = 255 - x[part] if place == inverted else x[part]
        clients.append(ClientData(f"c{place}", ("pen",), ArrayExamples(images, y[part]), {"pen": Untouchable()}))
    data = handwriting()
    return Federation("five clients", data.classes, tuple(clients), {"new": Untouchable()}, preparation=data.preparation)
