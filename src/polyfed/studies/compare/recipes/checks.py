"""Find problems that prevent a run with the given settings, without its data and without training.

Names and options are checked against the registries. If the classes and domains of the data set are known, blank images replace the data,
and the clients, the loss, the model and the method are built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

from polyfed.backends.choose import require_known
from polyfed.core.data_types import DataSet, Federation
from polyfed.core.method import load_file, methods, parse
from polyfed.data.own.own_data import is_own_data
from polyfed.data.partitions.federate import federate
from polyfed.data.placeholders import blank_data, blank_federation
from polyfed.data.registry import data_sets, partitions
from polyfed.errors import DataError, OptionError, PolyfedError, nearest
from polyfed.models import models
from polyfed.registry import Recorded, Registry
from polyfed.runs.assemble import build_bench, build_loss, prepared_model
from polyfed.settings import AUTO, Settings
from polyfed.tasks.losses import losses
from polyfed.text import Call, read_call, read_sum

_SET_BY_RUN = ("root", "classes", "input_shape", "dataset", "seed", "class_counts")


def problems_of(settings: Settings) -> list[str]:
    """Return the problems that prevent a run with these settings, if they can be detected without the data files."""
    problems = text_problems(settings)
    record = record_of(settings.data)
    if record is not None and not problems:
        try:
            _build_without_files(settings, record)
        except PolyfedError as error:
            problems.append(str(error))
    return problems


def text_problems(settings: Settings) -> list[str]:
    """Return the problems with names and options, without building any part of the run."""
    problems: list[str] = []

    def check(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except PolyfedError as error:
            problems.append(str(error))
            return None

    for file in settings.load:
        check(load_file, file, settings.trust)
    for call in check(read_sum, settings.method) or ():
        check(_check_part, call)
    if not problems:
        check(parse, settings.method)
    check(_check_data, settings.data)
    if settings.model is not None and not _is_external(settings.model):
        check(_check_call, models, settings.model)
    check(_check_call, partitions, settings.partition)
    if settings.loss != AUTO:
        check(_check_call, losses, settings.loss)
    check(require_known, settings.backend)
    return problems


def _is_external(model: str) -> bool:
    """Return True for a model from a library or a user's module, which is only looked up when the run starts."""
    return ":" in model.split("(")[0]


def _check_part(call: Call) -> None:
    record = methods.find(call.name)
    _check_options(record, call)
    record.extra["build_with"](*call.positional, **call.named)


def _check_call(registry: Registry[Any], text: str) -> Recorded[Any]:
    call = read_call(text)
    record = registry.find(call.name)
    _check_options(record, call)
    return record


def _check_options(record: Recorded[Any], call: Call) -> None:
    """Check the names and types of the options, without those that the run sets."""
    parameters = record.signature.parameters
    taken = [key for key in call.named if key in _SET_BY_RUN and key in parameters]
    if taken:
        raise OptionError(f"{record.name}: {', '.join(taken)} is set by the run. Remove it.")
    free = [parameter for key, parameter in parameters.items() if key not in _SET_BY_RUN]
    dataclasses.replace(record, signature=inspect.Signature(free)).bind(call)


@functools.cache
def _check_data(text: str) -> None:
    """Check the name and options of a registered data set without its files; accept any folder."""
    if _is_path(text):
        return
    if "root" not in _check_call(data_sets, text).signature.parameters:
        embedded(text)
        return
    # Options are checked before files are read: an empty folder makes valid options fail with DataError only.
    with tempfile.TemporaryDirectory() as empty, contextlib.suppress(DataError):
        data_sets.build(text, root=empty)


def _is_path(text: str) -> bool:
    return "/" in text.split("(")[0] or is_own_data(text)


def record_of(data: str) -> Recorded[DataSet] | None:
    """Return the registered data set, or None for a folder or an invalid expression."""
    if _is_path(data):
        return None
    try:
        return _check_call(data_sets, data)
    except PolyfedError:
        return None


@functools.cache
def embedded(text: str) -> DataSet:
    return data_sets.build(text)


def _build_without_files(settings: Settings, record: Recorded[DataSet]) -> None:
    """Partition the data set (or blank data if it needs files), and build the loss, the model and the method."""
    declaration, needs_files = record.extra.get("declaration"), "root" in record.signature.parameters
    if declaration is None and needs_files:
        return
    data = blank_data(settings.data, record, settings.unseen) if needs_files else embedded(settings.data)
    names = [domain.name for domain in data.domains]
    if declaration is not None:
        names = [*declaration.domains, *(name for domains in declaration.expected.values() for name in domains)]
    for domain in settings.unseen:
        if domain not in names:
            raise DataError(f"{settings.data} has no domain {domain!r}. {nearest(domain, names)}")
    _split(data, dataclasses.replace(settings, partition="domain"))
    try:
        clients = _split(data, settings).clients
    except DataError:
        if not needs_files:
            raise
        # The data files may have more images, or natural ids.
        clients = federate(data, "domain", settings.unseen).clients
    settings.sampled(len(clients))
    if needs_files:
        federation = blank_federation(settings.data, record, settings.unseen)
    else:
        federation = _split(data, dataclasses.replace(settings, partition="domain", few_shot=0))
    build_loss(settings.loss, federation)
    is_model_known = not needs_files if settings.model is None else not _is_external(settings.model)
    if is_model_known:
        method = parse(settings.method)
        population = federation if method.population is None else method.population(federation)
        build_bench(settings, method, population, prepared_model(settings, method, population, None, None))


def _split(data: DataSet, settings: Settings) -> Federation:
    return federate(data, settings.partition, settings.unseen, settings.seed, settings.few_shot, settings.unseen_part)
