"""What the server has in the place of data: blank inputs with the numbers that the nodes told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyfed.data.federation import ClientData, Federation, Preparation
from polyfed.flower.roster import Description
from polyfed.outline import INPUT_TYPES
from polyfed.recipes.stand_ins import Blank


def federation_of(told: Sequence[Description]) -> Federation:
    """A federation of stand-ins, in which everything but the data is as at the nodes; in whatever order they came, it is the same."""
    told = sorted(told, key=lambda one: one.client)
    first = told[0]
    return Federation(
        name=first.name,
        classes=first.classes,
        clients=tuple(_client(one) for one in told),
        preparation=Preparation(first.mean, first.std),
        default_model=first.default_model,
        source="; ".join(dict.fromkeys(one.source for one in told)),
    )


def _client(told: Description) -> ClientData:
    labels = torch.repeat_interleave(torch.arange(len(told.class_counts)), torch.tensor(told.class_counts))
    return ClientData(
        id=told.client,
        domains=told.domains,
        train=_blank(labels, told),
        tests={domain: _unknown(count, told) for domain, count in told.tests.items()},
        validation=None if told.validation is None else _unknown(told.validation, told),
    )


def _unknown(count: int, told: Description) -> Blank:
    """Test data, of which the labels stay with the node."""
    return _blank(torch.zeros(count, dtype=torch.int64), told)


def _blank(labels: Tensor, told: Description) -> Blank:
    return Blank(labels, told.input_shape, INPUT_TYPES[told.input_type])
