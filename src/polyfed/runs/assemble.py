"""From settings to the things a run needs: federation, model, plan, bench, server."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from polyfed.core.workbench import Workbench, chosen_device
from polyfed.data.own.own_data import is_own_data, options_of_own_data, own_data
from polyfed.data.partitions.partition import federate
from polyfed.data.registry import data_sets
from polyfed.errors import DataError, ModelError, PolyfedError, SettingError, UnknownName
from polyfed.models import models
from polyfed.models.model_text import as_call, images_of_weights
from polyfed.runs.model_checks import check_entries, check_output, materialise, require_trainable
from polyfed.settings import AUTO, Settings
from polyfed.tasks.known import require_measure, require_same, task_for
from polyfed.tasks.losses import Loss, task_loss
from polyfed.tasks.task import Task
from polyfed.trust import Trust, code_in, names_function


def build_data_set(data: Any, settings: Settings, recorded_shape: Sequence[int] | None = None) -> DataSet:
    """A data set from its name, a folder, a DataSet, or torch data sets by domain.

    Args:
        data: the data.
        settings: of the run.
        recorded_shape: of the inputs of a run that is opened again: where it was not begun at the size that its weights want, images
            are not read at that size now.
    """
    if isinstance(data, DataSet):
        return data
    if isinstance(data, Mapping):
        return from_torch(data, settings.task)
    if not isinstance(data, str | Path):
        raise DataError(
            f"Cannot use {type(data).__name__} as data: give a name, a folder, or {{domain: (train, test)}} of torch data sets."
        )
    text = str(data)
    images = images_of_weights(settings.model)
    asked = {} if settings.task == AUTO else {"task": settings.task}
    if images is None or (recorded_shape is not None and tuple(recorded_shape[-2:]) != (images.side, images.side)):
        return data_set_with(text, settings, asked)
    built = data_set_with(text, settings, {**asked, "size": images.side})
    return _at_size_of_weights(built, settings) if "size" in _open_options(text, settings) else built


def data_set_with(text: str, settings: Settings, wanted: Mapping[str, int | bool | str]) -> DataSet:
    """A data set from its name, a folder or a table, with these values of options that it has and its text leaves open."""
    if "/" in text.split("(")[0] and not is_own_data(text):
        raise DataError(
            f"There is no folder or table {text}. Data are a name (polyfed ls data), a folder root/<domain>/<class>/*, or a table "
            "of images (.csv, .tsv, .parquet)."
        )
    given = {name: value for name, value in wanted.items() if name in _open_options(text, settings)}
    if is_own_data(text):
        return own_data(text, **given)
    try:
        return data_sets.build(text, **_root(settings), **given)
    except UnknownName as error:
        raise UnknownName(f"{error} A folder root/<domain>/<class>/* works too.") from error


def _open_options(text: str, settings: Settings) -> Collection[str]:
    """The options of data that their text says nothing of."""
    if is_own_data(text):
        return options_of_own_data(text)
    name = text.split("(")[0].strip()
    if name not in data_sets:
        return ()
    return set(data_sets.find(name).signature.parameters) - set(data_sets.options_in(text, _root(settings)))


def _root(settings: Settings) -> dict[str, str]:
    return {} if settings.root is None else {"root": settings.root}


def _at_size_of_weights(data: DataSet, settings: Settings) -> DataSet:
    """The data set with a note that says where the size of its images comes from."""
    side = data.domains[0].train.batch(slice(0, 1))[0].shape[-1]
    note = f"Images are read at {side}x{side} pixels, the size that the weights of {settings.model} want; size=... in the text of the data says otherwise."
    return dataclasses.replace(data, notes=(*data.notes, note))


def reads_files(text: str) -> bool:
    """Whether the root of the settings says where these data are."""
    name = text.split("(")[0].strip()
    return not is_own_data(text) and (name not in data_sets or "root" in data_sets.find(name).signature.parameters)


def from_torch(data: Mapping[str, Any], task: str = AUTO) -> DataSet:
    """A data set from torch data sets (or pairs of tensors): ``{domain: (train, test)}`` or ``{domain: (train, validation, test)}``.

    Args:
        data: what each domain has.
        task: what is learnt, or "auto": as the targets tell.
    """
    domains = []
    for name, parts in data.items():
        if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
            raise DataError(f"Domain {name!r}: give (train, test) or (train, validation, test), found {type(parts).__name__}.")
        examples = [_examples(part) for part in parts]
        domains.append(
            Domain(str(name), train=examples[0], test=examples[-1], validation=examples[1] if len(examples) == 3 else None)
        )
    if not domains:
        raise DataError("No domains were given. Give {domain: (train, test)} of torch data sets.")
    targets = {f"{what} of domain {d.name}": part.labels for d in domains for what, part in _parts(d) if len(part)}
    if not targets:
        raise DataError("The domains hold no examples. Give (train, test) with some in each.")
    found = task_for(task, list(targets.values()))
    for whose, own in targets.items():
        if problem := found.problem(own):
            raise DataError(f"Targets of the {whose} {problem}. {found.name.capitalize()} takes {found.targets}.")
    return DataSet(
        "given data",
        tuple(str(index) for index in range(found.width(list(targets.values())))),
        tuple(domains),
        default_model=found.default_model,
        source="torch data sets given in Python",
        task=found,
    )


def _parts(domain: Domain) -> Iterator[tuple[str, Examples]]:
    """The parts that say how many classes there are."""
    yield from (("training part", domain.train), ("test part", domain.test))


def _examples(part: Any) -> Examples:
    if isinstance(part, Examples):
        return part
    if isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(item, Tensor) for item in part):
        return ArrayExamples(part[0], part[1])
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return DatasetExamples(part)
    raise DataError(f"Cannot take examples from {type(part).__name__}: give a map-style torch data set or a pair of tensors.")


def build_federation(data: Any, settings: Settings, recorded_shape: Sequence[int] | None = None) -> Federation:
    """A federation from data, the partition, and the domains left out; ``recorded_shape`` is as for ``build_data_set``."""
    if isinstance(data, Federation):
        require_same(settings.task, data.task, data.name)
        _check_labels(data)
        return data
    dataset = build_data_set(data, settings, recorded_shape)
    require_same(settings.task, dataset.task, dataset.name)
    for domain in dataset.domains:
        dataset.task.check(domain.train, f"domain {domain.name}", len(dataset.classes))
    federation = federate(dataset, settings.partition, settings.unseen, settings.seed, settings.few_shot, settings.unseen_part)
    _check_labels(federation)
    # A data set is made by code that runs here already, not by a file.
    return dataclasses.replace(federation, trusts_default_model=True)


def _check_labels(federation: Federation) -> None:
    """Refuse training and validation targets that the task does not have; the client and the target are named."""
    for client in federation.clients:
        for examples in (client.train, client.validation):
            if examples is not None:
                federation.task.check(examples, f"client {client.id}", len(federation.classes))


def build_model(
    model: str | nn.Module | Callable[..., nn.Module] | None, federation: Federation, seed: int, trust: Trust
) -> nn.Module:
    """A model by name, from ``module.path:function``, from a function, or a copy of a given one."""
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
    """The function named ``module.path:function``, if it is trusted; the working folder is searched too."""
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
            f"Cannot find the model {text}: {raised}. Write it as module.path:function; the module is looked for in this folder too."
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
            f"{name} could not build a model: it raised {type(error).__name__}{f': {error}' if str(error) else ''}. It is called with "
            f"those of classes={context['classes']} and input_shape={context['input_shape']} that it takes."
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} returned {type(made).__name__}, not a torch module.")
    return made


def _load_initial(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Load initial weights if all names and shapes are the model's; say whether they were."""
    own = model.state_dict()
    if set(own) - set(state) or any(own[name].shape != state[name].shape for name in own):
        return False
    model.load_state_dict({name: state[name] for name in own})
    return True


def prepared_model(
    settings: Settings, method: Method, federation: Federation, model: Any, initial: Mapping[str, Tensor] | None
) -> nn.Module:
    """The model after surgery, with initial weights where they fit: before the surgery or after it."""
    built = build_model(model if model is not None else settings.model, federation, settings.seed, settings.trust)
    check_output(built, federation)
    check_entries(built)
    loaded = initial is not None and _load_initial(built, initial)
    with default_stream(settings.seed, "surgery"):
        for operate in method.surgery:
            built = operated(operate, built, federation.sample_input(), settings.head, method)
    if method.surgery:
        check_output(built, federation)
    if initial is not None and not loaded and not _load_initial(built, initial):
        strange = sorted(set(built.state_dict()) ^ set(initial))[:3]
        raise ModelError(f"--init does not fit {type(built).__name__}: names or shapes differ ({', '.join(strange) or 'shapes'}).")
    require_trainable(built)
    return built


def normalised_for(model: nn.Module, federation: Federation) -> Federation:
    """The federation with images normalised as the model's published weights want it, where the model says so (``model.normalisation``)."""
    wanted = getattr(model, "normalisation", None)
    if not wanted:
        return federation
    mean, std = wanted
    return dataclasses.replace(federation, preparation=dataclasses.replace(federation.preparation, mean=mean, std=std))


def operated(operate: Surgery | HeadSurgery, model: nn.Module, sample: Tensor, named_head: str | None, method: Method) -> nn.Module:
    """The model after one surgery; one that asks for the head is given its path."""
    if not declared(operate).needs_head:
        return cast("Surgery", operate)(model)
    head, doubt = find_head(model, sample, named_head)
    if head is None:
        raise ModelError(f"{method} changes the model at its head: {doubt}.")
    return cast("HeadSurgery", operate)(model, head)


def build_bench(settings: Settings, method: Method, federation: Federation, model: nn.Module) -> Workbench:
    """The plan for this model, and the bench clients work at."""
    head, doubt = find_head(model, federation.sample_input(), settings.head)
    entries = entries_of(model, head)
    entries |= optimizer_entries(entries, settings.optimizer_buffers)
    if doubt and any("head" in rule.select.kinds for rule in method.sharing):
        raise ModelError(f"{method}: {doubt}.")
    only_share = [part.name for part in method.parts if part.filled_slots == ["sharing"]]
    check_none_redundant(entries, method.sharing, settings.rounds, only_share)
    plan = Plan(entries, method.sharing, settings.rounds)
    _refuse_task(method, federation.task)
    if settings.sampling == "balanced":
        federation.task.require_class_labels("--sampling balanced")
    require_measure(settings.metric, federation.task)
    if settings.patience:
        require_measure(settings.patience[0], federation.task)
    loss = build_loss(settings.loss, federation)
    device = chosen_device(settings.device)
    _refuse_two_samplings(settings, method)
    classes, task, shape = len(federation.classes), federation.task, tuple(federation.sample_input().shape[1:])
    bench = Workbench(
        model, method, plan, settings, federation.preparation, loss, classes, head, device=device, task=task, input_shape=shape
    )
    _refuse_single_samples(bench)
    for item in filled_slots(method):
        declared(item).check(bench)
    return bench


def filled_slots(method: Method) -> Iterator[Any]:
    """Everything a method has put into its slots."""
    for slot in SLOTS:
        yield from method.items(slot)


def build_loss(text: str, federation: Federation) -> Loss:
    """The task loss; one that asks for the numbers of examples by class is given them."""
    return task_loss(text, federation.task, class_counts(federation))


def class_counts(federation: Federation) -> list[int]:
    """Training examples of each class over all clients, where the task counts any."""
    counts = [federation.task.class_counts(client.train, len(federation.classes)) for client in federation.clients]
    return [sum(column) for column in zip(*counts, strict=True)]


def _refuse_task(method: Method, task: Task) -> None:
    for part in method.parts:
        if part.facts.class_labels:
            task.require_class_labels(part.name if method.parts == (part,) else f"{method}: {part.name}")


def _refuse_single_samples(bench: Workbench) -> None:
    """Reject batches of one sample with batch norm before the first round."""
    if bench.batch_norms and bench.settings.batch_size == 1 and bench.settings.last_batch != "keep":
        raise SettingError(
            f"{bench.method}: {type(bench.model).__name__} has batch norm, which cannot train on batches of one sample. "
            "Use --batch-size 2 or more, or replace the norm (fedavg + group_norm)."
        )


def _refuse_two_samplings(settings: Settings, method: Method) -> None:
    """Refuse a sampling of the settings where the method draws batches in its own way."""
    if method.sampling is not None and settings.sampling != Settings.sampling:
        raise SettingError(f"{method} draws its batches in its own way: use --sampling shuffled, not {settings.sampling}.")


def refuse_absent(settings: Settings, method: Method, clients: int) -> None:
    """Refuse to leave clients out of a round where the method needs all of them."""
    if method.facts.full_participation and settings.sampled(clients) < clients:
        raise SettingError(f"{method}: every client must take part in every round; leave --clients-per-round out.")


def notices(settings: Settings, method: Method, bench: Workbench, clients: int) -> list[str]:
    """What a user should know before the run: contradictions that are allowed but cost something."""
    notes = {id(item): declared(item).notice(bench, clients) for item in filled_slots(method)}
    found = [text for text in dict.fromkeys(notes.values()) if text]
    sampled = settings.sampled(clients)
    if (bench.plan.keeps_state or method.facts.client_state) and sampled < clients:
        found.append(
            f"{method} keeps state at clients, but only {sampled} of {clients} take part in a round: state will be old or missing for many."
        )
    if method.facts.data_derived_uploads:
        found.append(f"{method} sends more than model entries: {method.facts.data_derived_uploads}.")
    if method.newcomer is not None and settings.newcomer != Settings().newcomer:
        found.append(f"{method} decides itself what a newcomer gets; --newcomer {settings.newcomer} is not used.")
    if settings.root is not None and not reads_files(settings.data):
        found.append(f"--root {settings.root} is not used: {settings.data} is not read from the files of a data set.")
    smallest = method.facts.smallest_batch or (2 if bench.batch_norms else 1)
    if settings.batch_size < smallest:
        found.append(f"{method} is meant for batches of at least {smallest}; the batch size is {settings.batch_size}.")
    return found
