"""Blank images with the classes, domains and sizes of a declared data set, for checks without the data."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.data_types import ArrayExamples, DataSet, Domain, Federation
from polyfed.data.declaration import Declaration
from polyfed.data.federation_summary import ClientSummary, FederationSummary
from polyfed.data.store.examples import blank_examples
from polyfed.registry import Recorded
from polyfed.text import read_call

DEFAULT_EXAMPLES = 1000
PIXEL = (3, 1, 1)


def blank_data(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> DataSet:
    """Return all domains with their known number of training examples of one pixel each, which is enough for a partition."""
    declaration: Declaration = record.extra["declaration"]
    count = len(declaration.classes)

    def blank(examples: int) -> ArrayExamples:
        return blank_examples(declaration.task.blank_targets(examples, (), count, PIXEL), PIXEL)

    domains = [
        Domain(name, train=blank(_training_size(declaration, name, data)), test=blank(count))
        for name in dict.fromkeys([*declaration.domains, *unseen])
    ]
    return DataSet(record.name, declaration.classes, tuple(domains), task=declaration.task)


def blank_federation(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> Federation:
    """Return one client per domain with one image of each class, at full size, which is enough to try a model."""
    declaration: Declaration = record.extra["declaration"]
    size = next((option.default for option in declaration.options if option.name == "size"), declaration.side)
    chosen = read_call(data).named.get("size", size)
    side = chosen if isinstance(chosen, int) and chosen > 0 else declaration.side
    count = len(declaration.classes)
    clients = tuple(ClientSummary(name, (name,), count, {name: count}) for name in declaration.domains if name not in unseen)
    return FederationSummary(record.name, declaration.task, declaration.classes, clients, (3, side, side)).federation()


def _training_size(declaration: Declaration, domain: str, data: str) -> int:
    known = [sizes[domain]["train"] for sizes in declaration.expected.values() if "train" in sizes.get(domain, {})]
    largest = max((total if isinstance(total, int) else sum(total) for total in known), default=DEFAULT_EXAMPLES)
    chosen = read_call(data).named.get("per_domain", 0)
    return min(largest, chosen) if isinstance(chosen, int) and chosen else largest
