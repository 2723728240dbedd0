"""Find what keeps settings from being run, without their data and without training: names, options, joins, the method on the model.

Texts are read with the registries that a run uses. Where the data set's classes and domains are known, blank images stand in for the
data, so that the clients, the loss, the model and the method are built for real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Iterator
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

_GIVEN_BY_RUN = ("root", "classes", "input_shape", "dataset", "seed", "class_counts")


class _Findings:
    """Problems, and the settings that have any."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.problems: list[str] = []

    @contextlib.contextmanager
    def about(self, setting: str) -> Iterator[None]:
        """Keep what goes wrong inside."""
        try:
            yield
        except PolyfedError as error:
            self.problems.append(str(error))
            self.wrong.add(setting)


def problems_of(settings: Settings) -> list[str]:
    """Return everything that keeps a run with these settings from starting, as far as it shows without the files of the data."""
    found = _check_texts(settings)
    if (record := record_of(settings.data)) is not None:
        _check_together(settings, record, found)
    return found.problems


def text_problems(settings: Settings) -> list[str]:
    """Return what is wrong with names and options, without building anything of the run."""
    return _check_texts(settings).problems


def _check_texts(settings: Settings) -> _Findings:
    found = _Findings()
    for file in settings.load:
        with found.about("load"):
            load_file(file, settings.trust)
    with found.about("method"):
        for call in read_sum(settings.method):
            with found.about("method"):
                record = methods.find(call.name)
                _check_options(record, call)
                record.extra["build_with"](*call.positional, **call.named)
    if not found.wrong & {"load", "method"}:
        with found.about("method"):
            parse(settings.method)
    with found.about("data"):
        _check_data(settings.data)
    with found.about("model"):
        if settings.model is not None and not _is_from_elsewhere(settings.model):
            _check_call(models, settings.model)
    with found.about("partition"):
        _check_call(partitions, settings.partition)
    with found.about("loss"):
        if settings.loss != AUTO:
            _check_call(losses, settings.loss)
    with found.about("backend"):
        require_known(settings.backend)
    return found


def _is_from_elsewhere(model: str) -> bool:
    """Return True for a model of a library or of a user's module; those are found when the run starts."""
    return ":" in model.split("(")[0]


def _check_call(registry: Registry[Any], text: str) -> Recorded[Any]:
    call = read_call(text)
    record = registry.find(call.name)
    _check_options(record, call)
    return record


def _check_options(record: Recorded[Any], call: Call) -> None:
    """The written options have the right names and plain types; what the run gives is left out."""
    parameters = record.signature.parameters
    taken = [key for key in call.named if key in _GIVEN_BY_RUN and key in parameters]
    if taken:
        raise OptionError(f"{record.name}: {', '.join(taken)} is set by the run, not in the text.")
    free = [parameter for key, parameter in parameters.items() if key not in _GIVEN_BY_RUN]
    dataclasses.replace(record, signature=inspect.Signature(free)).bind(call)


@functools.cache
def _check_data(text: str) -> None:
    """Require a registered data set with options it can use; a folder is not looked at, and files are not needed."""
    if _is_path(text):
        return
    if "root" not in _check_call(data_sets, text).signature.parameters:
        embedded(text)
        return
    # Options are read before files; an empty folder lets the one be refused and the other be missing.
    with tempfile.TemporaryDirectory() as empty, contextlib.suppress(DataError):
        data_sets.build(text, root=empty)


def _is_path(text: str) -> bool:
    return "/" in text.split("(")[0] or is_own_data(text)


def record_of(data: str) -> Recorded[DataSet] | None:
    """The registered data set; None for a folder and for what cannot be read."""
    if _is_path(data):
        return None
    try:
        return _check_call(data_sets, data)
    except PolyfedError:
        return None


@functools.cache
def embedded(text: str) -> DataSet:
    """A data set that needs no files, built."""
    return data_sets.build(text)


def _check_together(settings: Settings, record: Recorded[DataSet], found: _Findings) -> None:
    """What needs several settings at once: the domains split among clients, and the loss, the model and the method on them."""
    declaration, real = record.extra.get("declaration"), "root" not in record.signature.parameters
    if (declaration is None and not real) or (real and "data" in found.wrong):
        return
    data = embedded(settings.data) if real else blank_data(settings.data, record, settings.unseen)
    names = [domain.name for domain in data.domains]
    if declaration is not None:
        names = [*declaration.domains, *(name for domains in declaration.expected.values() for name in domains)]
    for domain in settings.unseen:
        with found.about("unseen"):
            if domain not in names:
                raise DataError(f"{settings.data} has no domain {domain!r}. {nearest(domain, names)}")
    if "unseen" not in found.wrong:
        with found.about("unseen"):
            _split(data, dataclasses.replace(settings, partition="domain"))
    if "unseen" in found.wrong:
        settings = dataclasses.replace(settings, unseen=(), few_shot=0)
    if "partition" not in found.wrong:
        with found.about("partition"):
            try:
                clients = _split(data, settings).clients
            except DataError:
                if real:
                    raise
                # The files may hold more, or natural ids; only they can say.
                clients = federate(data, "domain", settings.unseen).clients
            with found.about("clients_per_round"):
                settings.sampled(len(clients))
    if real:
        federation = _split(data, dataclasses.replace(settings, partition="domain", few_shot=0))
    else:
        federation = blank_federation(settings.data, record, settings.unseen)
    if "loss" not in found.wrong:
        with found.about("loss"):
            build_loss(settings.loss, federation)
    if "loss" in found.wrong:
        settings = dataclasses.replace(settings, loss=Settings.loss)
    is_known = real if settings.model is None else not _is_from_elsewhere(settings.model)
    if is_known and not found.wrong & {"method", "model", "load"}:
        method = parse(settings.method)
        with found.about("method"):
            population = federation if method.population is None else method.population(federation)
            build_bench(settings, method, population, prepared_model(settings, method, population, None, None))


def _split(data: DataSet, settings: Settings) -> Federation:
    return federate(data, settings.partition, settings.unseen, settings.seed, settings.few_shot, settings.unseen_part)
