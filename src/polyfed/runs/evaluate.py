"""Score a finished run on its own data or on other data: the run's domains for its clients, all others as unseen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polyfed.core import evaluation
from polyfed.core.data_types import ArrayExamples, DataSet, Domain, Examples, joined
from polyfed.core.evaluation import Row
from polyfed.data.store.examples import Relabelled
from polyfed.errors import DataError, SettingError, nearest
from polyfed.runs.assemble import data_set_with, reads_files
from polyfed.runs.experiment import Experiment, threads
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.headline import domains_of, headline_by_scores, warnings
from polyfed.runs.predict import ImageInputs
from polyfed.runs.reopen import open_experiment
from polyfed.runs.result import accuracy_table
from polyfed.settings import FACTS

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

ALL = "all"


@dataclass(frozen=True)
class Evaluation:
    """The scores of a run.

    Attributes:
        summary: what ``polyfed evaluate --json`` prints.
        choices: the newcomer models that were scored.
        has_choice: whether the choice of a newcomer model changes the scores.
        notices: warnings about options that change nothing.
    """

    summary: dict[str, Any]
    choices: tuple[str, ...]
    has_choice: bool
    notices: tuple[str, ...]


def evaluate_run(
    path: str | Path,
    data: str | None,
    newcomer: str | None,
    split: str,
    part: str | None,
    how: Reopening,
) -> Evaluation:
    """Do what ``polyfed.evaluate`` documents."""
    choices = _newcomer_choices(newcomer)
    _check_options(data, how.root, part, split)
    experiment = open_experiment(path, how if data is None else dataclasses.replace(how, root=None), own_data=data is None)
    if data is not None:
        use_other_tests(experiment, data, how.root, part or "test", how.notify)
    choices = choices or (experiment.settings.newcomer,)
    with threads(experiment.settings.threads):
        has_images = split != "test" or any(client.tests for client in experiment.backend.data.values())
        seen: list[Row] = experiment.talk(evaluation.seen(experiment.server, split, in_detail=True)) if has_images else []
        domains = experiment.federation.unseen if split == "test" else ()
        unseen = {
            choice: [row for domain in domains for row in experiment.unseen_rows(domain, choice, in_detail=True)]
            for choice in choices
        }
    notices = _unused_newcomer(experiment, newcomer) if newcomer is not None else ()
    summary = _summary(experiment, str(path), data, split, seen, unseen)
    has_choice = bool(experiment.federation.unseen) and experiment.method.newcomer is None
    return Evaluation(summary, tuple(choices), has_choice, tuple(notices))


def _newcomer_choices(newcomer: str | None) -> tuple[str, ...]:
    known = tuple(FACTS["newcomer"].choices)
    if newcomer is None or newcomer == ALL:
        return () if newcomer is None else known
    if newcomer not in known:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, (*known, ALL))}")
    return (newcomer,)


def _check_options(data: str | None, root: str | None, part: str | None, split: str) -> None:
    """Refuse options that are unknown, or would change nothing."""
    for name, value, known in (("split", split, ("test", "validation")), ("part", part or "test", ("test", ALL))):
        if value not in known:
            raise SettingError(f"--{name} cannot be {value!r}. {nearest(value, known)}")
    if data is None and part is not None:
        raise SettingError("--part is about other DATA, and none were given; of its own data the run has set aside what is tested.")
    if data is not None and split != "test":
        raise SettingError("--split validation is about the run's own data; leave DATA out, or use --part with them.")
    if data is not None and root is not None and not reads_files(data):
        raise SettingError(f"--root {root} would not be used: {data} is not read from files named here. Leave it out.")


def _unused_newcomer(experiment: Experiment, newcomer: str) -> list[str]:
    found = []
    if not experiment.federation.unseen:
        found.append("There is no unseen domain, so there is no newcomer. Give other DATA, or train with --unseen.")
    if experiment.method.newcomer is not None:
        found.append(f"{experiment.method} decides itself what a newcomer gets; --newcomer {newcomer} changes nothing.")
    return found


def _summary(
    experiment: Experiment, path: str, data: str | None, split: str, seen: list[Row], unseen: dict[str, list[Row]]
) -> dict[str, Any]:
    """The scores as one JSON object; ``accuracy`` has the run's newcomer choice, or the only one that was scored."""
    shown = unseen.get(experiment.settings.newcomer, next(iter(unseen.values())))
    rows = [*(dataclasses.replace(row, view="seen") for row in seen), *shown]
    domains = domains_of(rows)
    chosen = experiment.headline or headline_by_scores(experiment.settings.metric, domains)
    warned = warnings(domains, str(experiment.method))
    return {
        **({"warning": " ".join(warned)} if warned else {}),
        "run": path,
        "data": data or experiment.settings.data,
        "method": str(experiment.method),
        "rounds": experiment.server.round,
        "split": split,
        "metric": chosen.measure,
        "metric_reason": chosen.reason,
        "headline": accuracy_table(rows, chosen.measure),
        "accuracy": accuracy_table(rows),
        "newcomer": {
            choice: {row.domain: row.numbers.get(chosen.measure, math.nan) for row in found} for choice, found in unseen.items()
        },
        "test_sizes": experiment.test_sizes(),
        "scored_clients": experiment.scored_sample(),
        "scores": [{"view": row.view, "client": row.client, "domain": row.domain, **row.numbers} for row in [*seen, *shown]],
    }


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
    places = _label_places(other, federation.classes, notify)
    readable = [client for client in federation.clients if experiment.backend.can_read(client.id)]
    known = {domain for client in readable for domain in client.domains}
    if any(d.name not in known and d.name in client.domains for client in federation.clients for d in other.domains):
        notify("What the run's clients keep stayed at their nodes, so the newcomer's model is scored on their domains too.")

    def prepared(examples: Examples) -> Examples:
        return _fitted(examples if places is None else Relabelled(examples, places[examples.labels]), inputs)

    seen = {domain.name: prepared(domain.test) for domain in other.domains if domain.name in known}
    unseen = {domain.name: prepared(_part_of(domain, part)) for domain in other.domains if domain.name not in known}
    experiment.test_on(seen, unseen)


def _label_places(other: DataSet, classes: Sequence[str], notify: Callable[[str], None]) -> Tensor | None:
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


def _part_of(domain: Domain, part: str) -> Examples:
    if part == "test":
        return domain.test
    return joined(
        [examples for examples in (domain.train, domain.validation, domain.test) if examples is not None and len(examples)]
    )


def _fitted(examples: Examples, inputs: ImageInputs) -> Examples:
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
