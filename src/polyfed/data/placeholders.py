"""Placeholders for data that are not there: blank images with the classes, domains and sizes that a declaration states."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.data_types import DataSet, Domain, Federation
from polyfed.data.declaration import Declaration
from polyfed.data.federation_summary import ClientSummary, FederationSummary
from polyfed.data.store.examples import BlankExamples
from polyfed.registry import Recorded
from polyfed.text import read_call

USUAL_EXAMPLES = 1000
PIXEL = (3, 1, 1)


def blank_data(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> DataSet:
    """All domains with as many training examples as they are known to have, each of one pixel: enough for a partition."""
    declaration: Declaration = record.extra["declaration"]
    domains = [
        Domain(
            name,
            train=_blank(declaration, _training_size(declaration, name, data)),
            test=_blank(declaration, len(declaration.classes)),
        )
        for name in dict.fromkeys([*declaration.domains, *unseen])
    ]
    return DataSet(record.name, declaration.classes, tuple(domains), task=declaration.task)


def _blank(declaration: Declaration, count: int) -> BlankExamples:
    return BlankExamples(declaration.task.blank_targets(count, (), len(declaration.classes), PIXEL), PIXEL)


def blank_federation(data: str, record: Recorded[DataSet], unseen: Sequence[str]) -> Federation:
    """A client for each domain with one image of each class, as large as the run's: enough to try a model."""
    declaration: Declaration = record.extra["declaration"]
    side = _image_side(declaration, data)
    count = len(declaration.classes)
    clients = tuple(ClientSummary(name, (name,), count, {name: count}) for name in declaration.domains if name not in unseen)
    return FederationSummary(record.name, declaration.task, declaration.classes, clients, (3, side, side)).federation()


def _training_size(declaration: Declaration, domain: str, data: str) -> int:
    """The training examples of a domain: as known, or as few as the text asks for."""
    known = [counts for domains in declaration.expected.values() for name, counts in domains.items() if name == domain]
    totals = [
        total if isinstance(total, int) else sum(total) for counts in known for key, total in counts.items() if key == "train"
    ]
    most = max(totals, default=USUAL_EXAMPLES)
    asked = read_call(data).named.get("per_domain", 0)
    return min(most, asked) if isinstance(asked, int) and asked else most


def _image_side(declaration: Declaration, data: str) -> int:
    """The side of an image: the data set's own, or what the text asks for."""
    usual = next((option.default for option in declaration.options if option.name == "size"), declaration.side)
    asked = read_call(data).named.get("size", usual)
    return asked if isinstance(asked, int) and asked > 0 else declaration.side
