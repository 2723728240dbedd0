"""Open a finished run with its models and scores, and score it on its data or on other data. ``lifecycle.resume`` continues a run.

Other data is split as for the run: its domains for its clients, all others as unseen domains.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polyfed.backends.choose import BackendFor
from polyfed.backends.in_process import WithoutData
from polyfed.core import evaluation
from polyfed.core.data_types import ArrayExamples, DataSet, Domain, Examples, Federation, joined
from polyfed.core.evaluation import Row
from polyfed.data.federation_summary import FederationSummary, RecordedInputs
from polyfed.data.registry import data_sets
from polyfed.data.store.deep_ranges import DEEP_RANGE, describe_range, of_kind
from polyfed.data.store.examples import Relabelled
from polyfed.errors import DataError, ModelError, RunFolderError, SettingError, nearest
from polyfed.models.model_text import images_of_weights
from polyfed.models.weights import weights_skipped
from polyfed.runs.assemble import data_set_with, reads_files
from polyfed.runs.experiment import Experiment, threads
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.client_state_files import NODES, read_states
from polyfed.runs.folder.final_files import read_answers, restore_newcomer
from polyfed.runs.folder.manifest import NEWCOMER_FILE
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import HELD_BY_NODES, RunFolder
from polyfed.runs.folder.unfinished import describe_unfinished
from polyfed.runs.predict import ImageInputs
from polyfed.runs.result import Result, accuracy_table
from polyfed.runs.scores import LAST, domains_of, headline_by_scores, recorded_headline, rows_at, scored_rounds, warnings
from polyfed.settings import AUTO, FACTS, Settings

ON_ANY_DEVICE = Reopening(device="auto")
ALL = "all"


def open_run(path: str | Path, how: Reopening) -> Result:
    folder = RunFolder(path)
    experiment, notes = _opened(folder, how)
    lines = folder.sealed_lines(notes)
    by_round = {} if folder.settings().needs_validation else scored_rounds(lines)
    return Result(experiment, rows_at(lines, experiment.server.round), str(path), read_answers(folder, notes), by_round)


def open_experiment(path: str | Path, how: Reopening = ON_ANY_DEVICE, own_data: bool = False) -> Experiment:
    """Restore the experiment of a run from its final state, with its data or with placeholders."""
    return _opened(RunFolder(path), how, own_data)[0]


def _opened(folder: RunFolder, how: Reopening, own_data: bool = False) -> tuple[Experiment, dict[str, Any]]:
    """Return the restored experiment and the notes of its checkpoint."""
    settings = _inference_settings(how.settings_of(folder))
    at_nodes = HELD_BY_NODES in folder.document().get("given_in_python", [])
    folder.require_objects({"method": how.method, "model": how.model} | ({"data": None} if own_data else {}))
    method, model = how.method, None if isinstance(how.model, str) else how.model
    snapshot, unfinished = _final_snapshot(folder, how)
    if folder.settings().backend == "flower" and not at_nodes:  # the run folder contains the state of its virtual nodes
        snapshot.clients = read_states(folder.path / NODES, snapshot.clients)
    with weights_skipped():
        if own_data:
            experiment = Experiment(settings, None, method, model, recorded=folder.recorded_inputs())
        else:
            settings = dataclasses.replace(settings, unseen=(), few_shot=0)
            placeholders = _placeholder_federation(folder)
            recorded = RecordedInputs.of(placeholders)
            experiment = Experiment(settings, placeholders, method, model, without_data(at_nodes), recorded)
    experiment.set_headline(recorded_headline(folder.document()))
    experiment.origins = folder.document().get("origins", {})
    experiment.unfinished = unfinished
    _restore(experiment, snapshot, folder)
    return experiment, snapshot.notes


def _restore(experiment: Experiment, snapshot: Snapshot, folder: RunFolder) -> None:
    bench, state = experiment.bench, experiment.server.state
    misfits = [n for n, v in snapshot.state.items() if n in bench.live and (n not in state or state[n].shape != v.shape)]
    misfits += [n for n in snapshot.state if n not in bench.plan.entries]
    default_model = experiment.federation.default_model
    if misfits:
        raise ModelError(
            f"The weights in {folder.path} do not fit the model {experiment.settings.model or default_model} ({misfits[0]}). The run was "
            "trained with a different model."
        )
    experiment.restore(snapshot)
    settings = folder.settings()
    used = settings.model or folder.document().get("outline", {}).get("default_model", "")
    if settings.init is not None or images_of_weights(used) is not None:
        # The initial weights were not loaded again. Entries that were not trained are still in the server state.
        bench.initial |= {name: value for name, value in snapshot.state.items() if name in bench.live}
    folder.require_sealed(NEWCOMER_FILE, snapshot.notes)
    restore_newcomer(experiment, folder.path)


def _inference_settings(settings: Settings) -> Settings:
    """Return the settings without those that only training needs, which this machine may not support."""
    return dataclasses.replace(
        settings,
        backend="process",
        workers="1",
        compile="off",
        loss=AUTO,
        selection=LAST if settings.needs_validation else settings.selection,
        early_stopping=None,
        init=None,
    )


def _placeholder_federation(folder: RunFolder) -> Federation:
    document = folder.document()
    outline = document.get("outline")
    if not outline:
        raise RunFolderError(
            f"{folder.path / 'run.toml'} does not describe the data, so the run cannot be opened without it. "
            f"On a machine with the data, run: polyfed evaluate {folder.path}."
        )
    try:
        return FederationSummary.from_outline(outline, document.get("data", {}).get("name", "data")).federation()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise RunFolderError(
            f"The table [outline] of {folder.path / 'run.toml'} is damaged ({type(error).__name__}: {error}). Restore the file from a "
            "backup."
        ) from error


def without_data(at_nodes: bool) -> BackendFor:
    return lambda bench, clients: WithoutData(bench, clients, at_nodes)


def read_snapshot(path: str | Path, notify: Callable[[str], None]) -> Snapshot:
    """Return the newest good checkpoint of a run, and notify about damaged ones."""
    folder = RunFolder(path)
    folder.document()
    snapshot, complaints = folder.read()
    for complaint in complaints:
        notify(complaint)
    if snapshot is None:
        raise RunFolderError(f"{path} has no good checkpoint.")
    if not snapshot.notes.get("finished"):
        notify(f"{path} is unfinished; using its state after round {snapshot.round}. Resume it with: polyfed resume {path}")
    return snapshot


def _final_snapshot(folder: RunFolder, how: Reopening) -> tuple[Snapshot, str]:
    """Return the final state of a run. If it has none, raise an error, or return its newest good state with a warning."""
    folder.document()
    snapshot, complaints = folder.read()
    if snapshot is None:
        raise RunFolderError(" ".join([*complaints, f"{folder.path} has no good checkpoint."]))
    found = describe_unfinished(folder, snapshot, complaints)
    if found is None:
        return snapshot, ""
    if not how.allow_unfinished:
        raise RunFolderError(found.refusal)
    how.notify(f"{found.problem} {found.remedy}")
    return snapshot, found.warning


@dataclass(frozen=True)
class Evaluation:
    """The scores of a run.

    Attributes:
        summary: Output of ``polyfed evaluate --json``.
        choices: Newcomer models that were scored.
        has_choice: True if the newcomer model affects the scores.
        notices: Warnings about options without effect.
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
        seen: list[Row] = experiment.exchange(evaluation.seen(experiment.server, split, in_detail=True)) if has_images else []
        domains = experiment.federation.unseen if split == "test" else ()
        unseen = {
            choice: [row for domain in domains for row in experiment.unseen_rows(domain, choice, in_detail=True)]
            for choice in choices
        }
    notices = _options_without_effect(experiment, newcomer) if newcomer is not None else ()
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
    for name, value, known in (("split", split, ("test", "validation")), ("part", part or "test", ("test", ALL))):
        if value not in known:
            raise SettingError(f"--{name} cannot be {value!r}. {nearest(value, known)}")
    if data is None and part is not None:
        raise SettingError("--part requires DATA.")
    if data is not None and split != "test":
        raise SettingError("--split validation works only with the run's own data. Remove DATA, or use --part.")
    if data is not None and root is not None and not reads_files(data):
        raise SettingError(f"--root has no effect: {data} does not read files from a folder. Remove the option.")


def _options_without_effect(experiment: Experiment, newcomer: str) -> list[str]:
    found = []
    if not experiment.federation.unseen:
        found.append("--newcomer has no effect: the run has no unseen domain. Pass other DATA, or train with --unseen.")
    if experiment.method.newcomer is not None:
        found.append(f"--newcomer {newcomer} has no effect: {experiment.method} defines its own newcomer model.")
    return found


def _summary(
    experiment: Experiment, path: str, data: str | None, split: str, seen: list[Row], unseen: dict[str, list[Row]]
) -> dict[str, Any]:
    """Return the scores for JSON; ``accuracy`` uses the newcomer model of the run, or the only one that was scored."""
    shown = unseen.get(experiment.settings.newcomer, next(iter(unseen.values())))
    rows = [*(dataclasses.replace(row, view="seen") for row in seen), *shown]
    domains = domains_of(rows)
    chosen = experiment.headline or headline_by_scores(experiment.settings.metric, domains)
    warned = [*filter(None, [experiment.unfinished]), *warnings(domains, str(experiment.method))]
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
    """Replace the test data of a run.

    Args:
        experiment: The run.
        data: Data set name, folder or table; its files are read in the same way as those of the run.
        root: Data set folder.
        part: Part of a new domain to use: test, or all.
        notify: Called with messages for the user.
    """
    federation = experiment.federation
    inputs = ImageInputs.of(federation)
    wanted: dict[str, int | bool | str] = {**inputs.options(), "task": federation.task.name}
    other = data_set_with(data, dataclasses.replace(experiment.settings, data=data, root=root), wanted)
    fixed = DEEP_RANGE in data_sets.options_in(data)
    for note in (*other.notes, *(() if fixed else _scaled_by_own_range(other, federation))):
        notify(note)
    if other.task.name != federation.task.name:
        raise DataError(f"{other.name} is for {other.task.name}, but the run was trained for {federation.task.name}.")
    positions = _label_positions(other, federation.classes, notify)
    readable = [client for client in federation.clients if experiment.backend.can_read(client.id)]
    known = {domain for client in readable for domain in client.domains}
    if any(d.name not in known and d.name in client.domains for client in federation.clients for d in other.domains):
        notify("The local layers of the clients are at their nodes, so their domains are scored with the newcomer model.")

    def prepared(examples: Examples) -> Examples:
        return _fitted(examples if positions is None else Relabelled(examples, positions[examples.labels]), inputs)

    seen = {domain.name: prepared(domain.test) for domain in other.domains if domain.name in known}
    unseen = {domain.name: prepared(_part_of(domain, part)) for domain in other.domains if domain.name not in known}
    experiment.test_on(seen, unseen)


def _scaled_by_own_range(other: DataSet, federation: Federation) -> list[str]:
    """Return notices about deep images of new domains, if the domains of the run have no common range to scale these images by."""
    recorded = federation.preparation.deep_ranges
    return [
        f"The domain {domain} has images with more than 8 bits and is new to the run, which has no common range for them. They are scaled "
        f"by their own range, {describe_range(limits)}. To use another one, pass DATA with deep_range=..."
        for domain, by_kind in other.preparation.deep_ranges.items()
        for kind, limits in by_kind.items()
        if kind not in recorded.get(domain, {}) and len(set(of_kind(recorded, kind).values())) != 1
    ]


def _label_positions(other: DataSet, classes: Sequence[str], notify: Callable[[str], None]) -> Tensor | None:
    """Return the position of each class of other data in the run; None if the positions are the same."""
    if other.classes == tuple(classes):
        return None
    if other.task.class_labels and set(other.classes) <= set(classes):
        return torch.tensor([classes.index(name) for name in other.classes])
    if len(other.classes) != len(classes):
        raise DataError(
            f"{other.name} has {len(other.classes)} classes, but the run has {len(classes)}: {', '.join(classes[:12])}. "
            "Data with a subset of these class names can be used."
        )
    notify(f"{other.name} has different class names from the run; classes are matched by position.")
    return None


def _part_of(domain: Domain, part: str) -> Examples:
    if part == "test":
        return domain.test
    return joined(
        [examples for examples in (domain.train, domain.validation, domain.test) if examples is not None and len(examples)]
    )


def _fitted(examples: Examples, inputs: ImageInputs) -> Examples:
    """Resize images, and masks if any, to the input size of the run."""
    first, _ = examples.batch(slice(0, 1))
    if tuple(first.shape[1:]) == inputs.shape:
        return examples
    if first.dim() != 4 or first.dtype != torch.uint8 or first.shape[1] not in (1, 3):
        shape = "x".join(map(str, inputs.shape))
        raise DataError(
            f"Inputs of shape {tuple(first.shape[1:])} and type {first.dtype} cannot be converted to the {shape} of the run."
        )
    x, y = examples.batch(slice(None))
    if y.dim() == 3:
        y = interpolate(y[:, None].float(), (inputs.height, inputs.width), mode="nearest-exact")[:, 0].to(y.dtype)
    return ArrayExamples(inputs.tensor(x), y)
