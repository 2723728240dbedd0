"""A multi-label data set derived from another one: the labels of an example are its class and its domain."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyfed.core.data_types import DataSet, Domain, Examples
from polyfed.data.registry import data_sets
from polyfed.data.store.examples import Relabelled
from polyfed.errors import OptionError
from polyfed.tasks.known import MULTILABEL


def class_and_domain(of: str, root: str | None = None) -> DataSet:
    """Convert a classification data set to a multi-label one, whose labels are the class and the domain of each example.

    A model without domain information in its features cannot predict the domain, so this data set shows how much of it a method keeps.

    Args:
        of: Expression of the data set, such as "pacs(size=48)".
        root: Folder of its files.
    """
    inner = data_sets.build(of, **({} if root is None else {"root": root}))
    if not inner.task.class_labels:
        raise OptionError(f"class_and_domain requires a classification data set, but {of} is for {inner.task.name}.")
    names = tuple(domain.name for domain in inner.domains)
    domains = tuple(_relabel(domain, place, len(inner.classes), len(names)) for place, domain in enumerate(inner.domains))
    return replace(
        inner,
        name=f"{inner.name} (class and domain)",
        classes=(*inner.classes, *names),
        domains=domains,
        task=MULTILABEL,
        source=f"{inner.source}; labels: {len(inner.classes)} classes and {len(names)} domains",
    )


def _relabel(domain: Domain, place: int, classes: int, domains: int) -> Domain:
    def both(examples: Examples) -> Relabelled:
        row = torch.zeros(len(examples), classes + domains, dtype=torch.bool)
        row[torch.arange(len(examples)), examples.labels] = True
        row[:, classes + place] = True
        return Relabelled(examples, row)

    validation = None if domain.validation is None else both(domain.validation)
    return replace(domain, train=both(domain.train), test=both(domain.test), validation=validation)


data_sets.add(class_and_domain)
