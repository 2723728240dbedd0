"""Build the federation, model, sharing plan and workbench of a run from its settings."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from polyfed.core.data_types import ArrayExamples, DataSet, DatasetExamples, Domain, Examples, Federation
from polyfed.core.entries import entries_of, find_head, optimizer_entries
from polyfed.core.method import Method
from polyfed.core.part import declared
from polyfed.core.seeds import default_stream
from polyfed.core.sharing import Plan, check_none_redundant
from polyfed.core.slots import SLOTS, HeadSurgery, Surgery
from polyfed.core.workbench import Workbench, chosen_device, present_devices
from polyfed.data.federation_summary import RecordedInputs
from polyfed.data.own.own_data import is_own_data, options_of_own_data, own_data
from polyfed.data.own.table_columns import GROUP, UNCHECKED
from polyfed.data.partitions.partition import federate
from polyfed.data.registry import data_sets
from polyfed.data.store.deep_ranges import DEEP_RANGE, write_option
from polyfed.errors import DataError, ModelError, PolyfedError, SettingError, UnknownName
from polyfed.models import models
from polyfed.models.model_text import as_call, images_of_weights
from polyfed.runs.model_checks import check_entries, check_output, materialise, require_trainable
from polyfed.settings import AUTO, Settings
from polyfed.tasks.known import require_measure, require_same, task_for
from polyfed.tasks.losses import Loss, task_loss
from polyfed.trust import Trust, code_in, names_function


def build_data_set(data: Any, settings: Settings, recorded: RecordedInputs | None = None) -> DataSet:
    """Build a data set from its name, a folder, a DataSet, or torch data sets per domain.

    Args:
        data: The data.
        settings: Settings of the run.
        recorded: Inputs of a run that is opened again. If the run did not use the image size of its pretrained weights, the images are
            not read at that size now. Deep images are scaled as in the run. Columns that look like groups are not rejected.
    """
    if isinstance(data, DataSet):
        return data
    if isinstance(data, Mapping):
        return from_torch(data, settings.task)
    if not isinstance(data, str | Path):
        raise DataError(
            f"Cannot use {type(data).__name__} as data. Pass a name, a folder, or {{domain: (train, test)}} with torch data sets."
        )
    text = str(data)
    images = images_of_weights(settings.model)
    options = {} if settings.task == AUTO else {"task": settings.task}
    options |= {} if recorded is None else {GROUP: UNCHECKED, DEEP_RANGE: write_option(recorded.deep_ranges)}
    if images is None or (recorded is not None and tuple(recorded.shape[-2:]) != (images.side, images.side)):
        return data_set_with(text, settings, options)
    built = data_set_with(text, settings, {**options, "size": images.side})
    if "size" not in _open_options(text, settings):
        return built
    side = built.domains[0].train.batch(slice(0, 1))[0].shape[-1]
    note = f"Images are read at {side}x{side} pixels, the size for the weights of {settings.model}. Use size=... in DATA for another size."
    return dataclasses.replace(built, notes=(*built.notes, note))


def data_set_with(text: str, settings: Settings, wanted: Mapping[str, int | bool | str]) -> DataSet:
    """Build a data set from its name, a folder or a table, with these options, if it has them and the text does not set them."""
    if "/" in text.split("(")[0] and not is_own_data(text):
        raise DataError(
            f"Folder or table not found: {text}. Pass a data set name (polyfed ls data), a folder root/<domain>/<class>/*, or a table "
            "of images (.csv, .tsv, .parquet)."
        )
    given = {name: value for name, value in wanted.items() if name in _open_options(text, settings)}
    if is_own_data(text):
        return own_data(text, **given)
    try:
        return data_sets.build(text, **_root(settings), **given)
    except UnknownName as error:
        raise UnknownName(f"{error} A folder root/<domain>/<class>/* is also possible.") from error


def _open_options(text: str, settings: Settings) -> Collection[str]:
    """Return the options of a data set that the text does not set."""
    if is_own_data(text):
        return options_of_own_data(text)
    name = text.split("(")[0].strip()
    if name not in data_sets:
        return ()
    return set(data_sets.find(name).signature.parameters) - set(data_sets.options_in(text, _root(settings)))


def _root(settings: Settings) -> dict[str, str]:
    return {} if settings.root is None else {"root": settings.root}


def reads_files(text: str) -> bool:
    """Return True if ``root`` applies to this data."""
    name = text.split("(")[0].strip()
    return not is_own_data(text) and (name not in data_sets or "root" in data_sets.find(name).signature.parameters)


def from_torch(data: Mapping[str, Any], task: str = AUTO) -> DataSet:
    """Build a data set from torch data sets or pairs of tensors.

    Args:
        data: ``{domain: (train, test)}`` or ``{domain: (train, validation, test)}``.
        task: Name of the task; "auto" infers it from the targets.
    """
    domains = []
    for name, parts in data.items():
        if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
            raise DataError(f"Domain {name!r} must be (train, test) or (train, validation, test), got {type(parts).__name__}.")
        examples = [_examples(part) for part in parts]
        domains.append(
            Domain(str(name), train=examples[0], test=examples[-1], validation=examples[1] if len(examples) == 3 else None)
        )
    if not domains:
        raise DataError("There are no domains. Pass {domain: (train, test)} with torch data sets.")
    targets = {
        f"{what} of domain {d.name}": part.labels
        for d in domains
        for what, part in (("training part", d.train), ("test part", d.test))
        if len(part)
    }
    if not targets:
        raise DataError("The domains contain no examples. Pass (train, test) with examples in each.")
    found = task_for(task, list(targets.values()))
    for whose, own in targets.items():
        if problem := found.problem(own):
            raise DataError(f"Targets of the {whose} {problem}. {found.name.capitalize()} needs {found.targets}.")
    return DataSet(
        "given data",
        tuple(str(index) for index in range(found.width(list(targets.values())))),
        tuple(domains),
        default_model=found.default_model,
        source="torch data sets given in Python",
        task=found,
    )


def _examples(part: Any) -> Examples:
    if isinstance(part, Examples):
        return part
    if isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(item, Tensor) for item in part):
        return ArrayExamples(part[0], part[1])
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return DatasetExamples(part)
    raise DataError(f"Cannot read examples from {type(part).__name__}. Pass a map-style torch data set or a pair of tensors.")


def build_federation(data: Any, settings: Settings, recorded: RecordedInputs | None = None) -> Federation:
    """Partition data across clients, and hold out the unseen domains; ``recorded`` as for ``build_data_set``."""
    if isinstance(data, Federation):
        require_same(settings.task, data.task, data.name)
        _check_labels(data)
        return data
    dataset = build_data_set(data, settings, recorded)
    require_same(settings.task, dataset.task, dataset.name)
    for domain in dataset.domains:
        dataset.task.check(domain.train, f"domain {domain.name}", len(dataset.classes))
    federation = federate(dataset, settings.partition, settings.unseen, settings.seed, settings.few_shot, settings.unseen_part)
    _check_labels(federation)
    # Data sets come from code that already runs here, not from a file.
    return dataclasses.replace(federation, trusts_default_model=True)


def _check_labels(federation: Federation) -> None:
    """Raise an error that names the client and target if training or validation targets are invalid for the task."""
    for client in federation.clients:
        for examples in (client.train, client.validation):
            if examples is not None:
                federation.task.check(examples, f"client {client.id}", len(federation.classes))


def build_model(
    model: str | nn.Module | Callable[..., nn.Module] | None, federation: Federation, seed: int, trust: Trust
) -> nn.Module:
    """Build a model from its name, ``module.path:function`` or a function, or copy a given one."""
    sample = federation.sample_input()
    context = {"classes": len(federation.classes), "input_shape": tuple(sample.shape[1:])}
    if model is None or model == "":
        model = federation.default_model
        trust = trust.adding(code_in(model=model)) if federation.trusts_default_model else trust
    with default_stream(seed, "model"):
        built = _built(model, context, trust)
        materialise(built, sample)
    return built


def _built(model: str | nn.Module | Callable[..., nn.Module], context: Mapping[str, Any], trust: Trust) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if not isinstance(model, str):
        return _called(model, context, getattr(model, "__name__", "the given function"))
    if names_function(model):
        return _called(imported(model, trust), context, model)
    return models.build(as_call(model), **context)


def imported(text: str, trust: Trust) -> Callable[..., nn.Module]:
    """Import ``module.path:function``, if it is trusted, including from the working folder."""
    trust.require(code_in(model=text))
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        raised = str(error) if isinstance(error, ImportError | AttributeError | ValueError) else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"Cannot import the model {text}: {raised}. Use the form module.path:function; the working folder is searched too."
        ) from error
    if not callable(found):
        raise ModelError(f"{text} is not a function that builds a model.")
    return found  # type: ignore[no-any-return]


def _called(build: Callable[..., nn.Module], context: Mapping[str, Any], name: str) -> nn.Module:
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    try:
        made = build(**{key: value for key, value in context.items() if key in parameters})
    except PolyfedError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{name} could not build a model: it raised {type(error).__name__}{f': {error}' if str(error) else ''}. It receives "
            f"classes={context['classes']} and input_shape={context['input_shape']}, if it has these parameters."
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} returned {type(made).__name__}, not a torch module.")
    return made


def _load_initial(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Load initial weights, and return True, if all names and shapes match."""
    own = model.state_dict()
    if set(own) - set(state) or any(own[name].shape != state[name].shape for name in own):
        return False
    model.load_state_dict({name: state[name] for name in own})
    return True


def prepared_model(
    settings: Settings, method: Method, federation: Federation, model: Any, initial: Mapping[str, Tensor] | None
) -> nn.Module:
    """Return the model after surgery, with initial weights loaded before or after the surgery, whichever fits."""
    built = build_model(model if model is not None else settings.model, federation, settings.seed, settings.trust)
    check_output(built, federation)
    check_entries(built)
    loaded = initial is not None and _load_initial(built, initial)
    with default_stream(settings.seed, "surgery"):
        for operate in method.surgery:
            built = _after_surgery(operate, built, federation.sample_input(), settings.head, method)
    if method.surgery:
        check_output(built, federation)
    if initial is not None and not loaded and not _load_initial(built, initial):
        differing = sorted(set(built.state_dict()) ^ set(initial))[:3]
        raise ModelError(
            f"--init does not fit {type(built).__name__}: names or shapes differ ({', '.join(differing) or 'shapes'})."
        )
    require_trainable(built)
    return built


def normalised_for(model: nn.Module, federation: Federation) -> Federation:
    """Return the federation with the normalisation that the pretrained weights require (``model.normalisation``), if any."""
    normalisation = getattr(model, "normalisation", None)
    if not normalisation:
        return federation
    mean, std = normalisation
    return dataclasses.replace(federation, preparation=dataclasses.replace(federation.preparation, mean=mean, std=std))


def _after_surgery(
    operate: Surgery | HeadSurgery, model: nn.Module, sample: Tensor, named_head: str | None, method: Method
) -> nn.Module:
    if not declared(operate).needs_head:
        return cast("Surgery", operate)(model)
    head, doubt = find_head(model, sample, named_head)
    if head is None:
        raise ModelError(f"{method} replaces the head of the model: {doubt}.")
    return cast("HeadSurgery", operate)(model, head)


def build_bench(settings: Settings, method: Method, federation: Federation, model: nn.Module) -> Workbench:
    """Build the sharing plan for this model, and the workbench of the clients."""
    head, doubt = find_head(model, federation.sample_input(), settings.head)
    entries = entries_of(model, head)
    entries |= optimizer_entries(entries, settings.optimizer_buffers)
    if doubt and any("head" in rule.select.kinds for rule in method.sharing):
        raise ModelError(f"{method}: {doubt}.")
    only_share = [part.name for part in method.parts if part.filled_slots == ["sharing"]]
    check_none_redundant(entries, method.sharing, settings.rounds, only_share)
    plan = Plan(entries, method.sharing, settings.rounds)
    for part in method.parts:
        if part.facts.class_labels:
            federation.task.require_class_labels(part.name if method.parts == (part,) else f"{method}: {part.name}")
    if settings.sampling == "balanced":
        federation.task.require_class_labels("--sampling balanced")
    require_measure(settings.metric, federation.task)
    if settings.patience:
        require_measure(settings.patience[0], federation.task)
    loss = build_loss(settings.loss, federation)
    if method.sampling is not None and settings.sampling != Settings.sampling:
        raise SettingError(
            f"--sampling {settings.sampling} does not work with {method}, which defines its sampling. Remove the option."
        )
    bench = Workbench(
        model,
        method,
        plan,
        settings,
        federation.preparation,
        loss,
        len(federation.classes),
        head,
        device=chosen_device(settings.device),
        task=federation.task,
        input_shape=tuple(federation.sample_input().shape[1:]),
    )
    if bench.batch_norms and settings.batch_size == 1 and settings.last_batch != "keep":
        raise SettingError(
            f"{method}: {type(model).__name__} has batch norm, which cannot train on batches of one sample. "
            "Use --batch-size 2 or more, or replace the norm (fedavg + group_norm)."
        )
    for item in filled_slots(method):
        declared(item).check(bench)
    return bench


def filled_slots(method: Method) -> Iterator[Any]:
    """Yield all items in the slots of a method."""
    for slot in SLOTS:
        yield from method.items(slot)


def build_loss(text: str, federation: Federation) -> Loss:
    return task_loss(text, federation.task, class_counts(federation))


def class_counts(federation: Federation) -> list[int]:
    """Return the number of training examples of each class over all clients, if the task has classes."""
    counts = [federation.task.class_counts(client.train, len(federation.classes)) for client in federation.clients]
    return [sum(column) for column in zip(*counts, strict=True)]


def require_full_participation(settings: Settings, method: Method, clients: int) -> None:
    if method.facts.full_participation and settings.sampled(clients) < clients:
        raise SettingError(f"{method}: every client must take part in every round. Remove --clients-per-round.")


def notices(settings: Settings, method: Method, bench: Workbench, clients: int) -> list[str]:
    """Return notices for the user before the run: valid settings that have an unwanted effect, or none."""
    notes = {id(item): declared(item).notice(bench, clients) for item in filled_slots(method)}
    found = [text for text in dict.fromkeys(notes.values()) if text]
    sampled = settings.sampled(clients)
    if (bench.plan.keeps_state or method.facts.client_state) and sampled < clients:
        found.append(
            f"{method} keeps state at clients, but only {sampled} of {clients} clients train per round: the state of many is old or missing."
        )
    if method.facts.data_derived_uploads:
        found.append(f"{method} uploads more than model entries: {method.facts.data_derived_uploads}.")
    if method.newcomer is not None and settings.newcomer != Settings().newcomer:
        found.append(f"--newcomer {settings.newcomer} has no effect: {method} defines its own newcomer model.")
    if settings.root is not None and not reads_files(settings.data):
        found.append(f"--root {settings.root} has no effect: {settings.data} does not use files from a folder.")
    fastest = present_devices()[0]
    if settings.device == "cpu" and fastest != "cpu" and settings.backend != "flower":
        found.append(f"This machine has a GPU, but the run uses the CPU. Use --device {fastest} to train on the GPU (untested).")
    smallest = method.facts.smallest_batch or (2 if bench.batch_norms else 1)
    if settings.batch_size < smallest:
        found.append(
            f"{method} is designed for batches of at least {smallest} samples, but the batch size is {settings.batch_size}."
        )
    return found
