"""Other data in the place of a run's tests: its own domains for its clients, all others as unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polyfed.core.data_types import ArrayExamples, DataSet, Domain, Examples, joined
from polyfed.data.store.examples import Relabelled
from polyfed.errors import DataError
from polyfed.runs.assemble import data_set_with
from polyfed.runs.image_inputs import ImageInputs

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


def use_other_tests(experiment: Experiment, data: str, root: str | None, part: str, notify: Callable[[str], None]) -> None:
    """Put other images in the place of the run's tests.

    Args:
        experiment: the run.
        data: a data set by name, a folder or a table; its files are read as the run's own images were.
        root: the folder of its files, where it is a name.
        part: of a new domain: test, or all.
        notify: called with a sentence for what users should know.
    """
    federation = experiment.federation
    inputs = ImageInputs.of(federation)
    wanted: dict[str, int | bool | str] = {**inputs.options(), "task": federation.task.name}
    other = data_set_with(data, dataclasses.replace(experiment.settings, data=data, root=root), wanted)
    for note in other.notes:
        notify(note)
    if other.task.name != federation.task.name:
        raise DataError(f"{other.name} is for {other.task.name}, and the run was trained for {federation.task.name}.")
    places = label_places(other, federation.classes, notify)
    readable = [client for client in federation.clients if experiment.backend.can_read(client.id)]
    known = {domain for client in readable for domain in client.domains}
    if any(d.name not in known and d.name in client.domains for client in federation.clients for d in other.domains):
        notify("What the run's clients keep stayed at their nodes, so the newcomer's model is scored on their domains too.")

    def prepared(examples: Examples) -> Examples:
        return fitted(examples if places is None else Relabelled(examples, places[examples.labels]), inputs)

    seen = {domain.name: prepared(domain.test) for domain in other.domains if domain.name in known}
    unseen = {domain.name: prepared(part_of(domain, part)) for domain in other.domains if domain.name not in known}
    experiment.test_on(seen, unseen)


def label_places(other: DataSet, classes: Sequence[str], notify: Callable[[str], None]) -> Tensor | None:
    """Where the run has each class of other data; None where it has them in the same places."""
    if other.classes == tuple(classes):
        return None
    if other.task.class_labels and set(other.classes) <= set(classes):
        return torch.tensor([classes.index(name) for name in other.classes])
    if len(other.classes) != len(classes):
        raise DataError(
            f"{other.name} has {len(other.classes)} classes, but the run knows {len(classes)}: {', '.join(classes[:12])}. "
            "Classes that the run knows are matched by their names, and some may be missing."
        )
    notify(f"The classes of {other.name} have other names than those of the run; they are matched in their order.")
    return None


def part_of(domain: Domain, part: str) -> Examples:
    """The test part of a domain, or all of it."""
    if part == "test":
        return domain.test
    return joined(
        [examples for examples in (domain.train, domain.validation, domain.test) if examples is not None and len(examples)]
    )


def fitted(examples: Examples, inputs: ImageInputs) -> Examples:
    """The examples with images, and masks where there are some, at the size of the run's inputs."""
    first, _ = examples.batch(slice(0, 1))
    if tuple(first.shape[1:]) == inputs.shape:
        return examples
    if first.dim() != 4 or first.dtype != torch.uint8 or first.shape[1] not in (1, 3):
        shape = "x".join(map(str, inputs.shape))
        raise DataError(f"Inputs of shape {tuple(first.shape[1:])} and type {first.dtype} cannot be made to fit the run's {shape}.")
    x, y = examples.batch(slice(None))
    if y.dim() == 3:
        y = interpolate(y[:, None].float(), (inputs.height, inputs.width), mode="nearest-exact")[:, 0].to(y.dtype)
    return ArrayExamples(inputs.tensor(x), y)
