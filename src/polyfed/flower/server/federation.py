"""The federation at the server: placeholders for the nodes' data, and unseen domains stored on the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from polyfed.core.data_types import DeepRange, DeepRanges, Examples, Federation, Preparation
from polyfed.data.federation_summary import ClientSummary, FederationSummary, input_type
from polyfed.data.partitions.federate import whole_domain
from polyfed.errors import DataError
from polyfed.flower.wire.descriptions import Description
from polyfed.runs.assemble import build_data_set
from polyfed.settings import Settings
from polyfed.tasks.known import task_named

log = logging.getLogger("polyfed")


def federation_of(nodes: Sequence[Description]) -> Federation:
    """Return a federation with placeholders for the nodes' data, independent of the order of the nodes."""
    nodes = sorted(nodes, key=lambda node: node.client)
    first, names = nodes[0], sorted({node.name for node in nodes})
    return FederationSummary(
        name=names[0] if len(names) == 1 else f"{len(nodes)}-nodes",
        task=task_named(first.task),
        classes=first.classes,
        clients=tuple(
            ClientSummary(node.client, node.domains, node.samples, node.tests, node.validation, node.class_counts) for node in nodes
        ),
        input_shape=first.input_shape,
        input_type=first.input_type,
        preparation=Preparation(first.mean, first.std, middle_square=first.middle_square, deep_ranges=_deep_ranges(nodes)),
        default_model=first.default_model,
        source="; ".join(dict.fromkeys(node.source for node in nodes)),
    ).federation()


def _deep_ranges(nodes: Sequence[Description]) -> DeepRanges:
    """Return the ranges of deep images by domain, and by client if nodes scale the same domain differently."""
    found: dict[str, Mapping[str, DeepRange]] = {}
    for node in nodes:
        for domain, ranges in node.deep_ranges.items():
            found[domain if found.get(domain, ranges) == ranges else node.client] = ranges
    return found


def unseen_at_server(settings: Settings, data: str, node: Description) -> Mapping[str, Examples]:
    """Return the test data on the server by domain: the unseen domains of the settings, or all domains."""
    if not data:
        if settings.unseen:
            log.warning(
                "Unseen domains (%s) are not tested, because the nodes do not evaluate them. To test them on the server, use "
                "--run-config 'unseen-data=\"DIR\"'.",
                ", ".join(settings.unseen),
            )
        return {}
    found = build_data_set(data, settings)
    domains = [found.domain(name) for name in settings.unseen] or list(found.domains)
    if found.task.name != node.task:
        raise DataError(f"unseen-data {data} is for {found.task.name}; nodes have data for {node.task}.")
    if found.classes != node.classes:
        raise DataError(f"unseen-data {data} has the classes {', '.join(found.classes)}; nodes have {', '.join(node.classes)}.")
    tests = {domain.name: domain.test if settings.unseen_part == "test" else whole_domain(domain) for domain in domains}
    for name, examples in tests.items():
        raw, _ = examples.batch(slice(0, 1))
        if tuple(raw.shape[1:]) != node.input_shape or input_type(raw) != node.input_type:
            raise DataError(
                f"Inputs of unseen-data {data} ({name}) have the shape {tuple(raw.shape[1:])} ({input_type(raw)}), those of nodes "
                f"{node.input_shape} ({node.input_type}). Specify the size: unseen-data='image_folder(root=\"DIR\", size=32)'."
            )
    return tests
