"""What the server has in the place of data: blank inputs with the numbers that the nodes told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyfed.data.federation import ClientData, Federation
from polyfed.flower.roster import Description
from polyfed.recipes.stand_ins import Blank


def federation_of(told: Sequence[Description]) -> Federation:
    """A federation of stand-ins, in which everything but the data is as at the nodes; in whatever order they came, it is the same."""
    told = sorted(told, key=lambda one: one.client)
    first = told[0]
    return Federation(
        name=first.name,
        classes=first.classes,
        clients=tuple(_client(one) for one in told),
        default_model=first.default_model,
        source="; ".join(dict.fromkeys(one.source for one in told)),
    )


def _client(told: Description) -> ClientData:
    labels = torch.repeat_interleave(torch.arange(len(told.class_counts)), torch.tensor(told.class_counts))
    return ClientData(
        id=told.client,
        domains=told.domains,
        train=_blank(labels, told.input_shape),
        tests={domain: _unknown(count, told.input_shape) for domain, count in told.tests.items()},
        validation=None if told.validation is None else _unknown(told.validation, told.input_shape),
    )


def _unknown(count: int, shape: tuple[int, ...]) -> Blank:
    """Test data, of which the labels stay with the node."""
    return _blank(torch.zeros(count, dtype=torch.int64), shape)


def _blank(labels: Tensor, shape: tuple[int, ...]) -> Blank:
    """Inputs as a model takes them: prepared already."""
    return Blank(labels, shape, torch.float32)
