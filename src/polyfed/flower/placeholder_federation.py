"""What the server has in the place of data: blank inputs in the numbers that the nodes reported."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.core.data_types import ClientData, Federation, Preparation
from polyfed.core.tasks.known import task_named
from polyfed.data.federation_summary import INPUT_TYPES
from polyfed.data.placeholders import BlankExamples
from polyfed.flower.descriptions import Description


def federation_of(nodes: Sequence[Description]) -> Federation:
    """A federation of placeholders, in which everything but the data is as at the nodes; it does not depend on the order of the nodes."""
    nodes = sorted(nodes, key=lambda node: node.client)
    first, names = nodes[0], sorted({node.name for node in nodes})
    return Federation(
        name=names[0] if len(names) == 1 else f"{len(nodes)}-nodes",
        classes=first.classes,
        clients=tuple(_client(node) for node in nodes),
        preparation=Preparation(first.mean, first.std, middle_square=first.middle_square),
        default_model=first.default_model,
        task=task_named(first.task),
        source="; ".join(dict.fromkeys(node.source for node in nodes)),
    )


def _client(node: Description) -> ClientData:
    return ClientData(
        id=node.client,
        domains=node.domains,
        train=_blank(_targets(node.samples, node.class_counts, node), node),
        tests={domain: _unknown(count, node) for domain, count in node.tests.items()},
        validation=None if node.validation is None else _unknown(node.validation, node),
    )


def _unknown(count: int, node: Description) -> BlankExamples:
    """Test data, of which the labels stay with the node."""
    return _blank(_targets(count, (), node), node)


def _targets(count: int, class_counts: Sequence[int], node: Description) -> Tensor:
    return task_named(node.task).blank_targets(count, class_counts, len(node.classes), node.input_shape)


def _blank(labels: Tensor, node: Description) -> BlankExamples:
    return BlankExamples(labels, node.input_shape, INPUT_TYPES[node.input_type])
