"""Whether a recipe would run, found out without data and without training: names, options, joins, and what needs the model.

The texts of a recipe are read with the same registries that a run uses. Where the data set's classes and domains are known,
blank images are the placeholder for the data, so that the model, its head and the sharing rules are tried for real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from polyfed.backends.choose import require_known
from polyfed.core.data_types import DataSet, Federation
from polyfed.core.load_methods import load_file
from polyfed.core.losses import losses
from polyfed.core.method import Method, join, methods, parse
from polyfed.core.registry import Recorded, Registry
from polyfed.data.declaration import Declaration
from polyfed.data.own.own_data import is_own_data
from polyfed.data.partitions.federate import federate
from polyfed.data.placeholders import blank_data, blank_federation
from polyfed.data.registry import data_sets, partitions
from polyfed.errors import DataError, OptionError, PolyfedError, nearest
from polyfed.models import models
from polyfed.runs.assemble import build_bench, build_loss, prepared_model
from polyfed.settings import AUTO, Settings
from polyfed.text import Call, read_call, read_sum

GIVEN_BY_RUN = ("root", "classes", "input_shape", "dataset", "seed", "class_counts")


class Findings:
    """Gathers problems; ``wrong`` are the settings that have any."""

    def __init__(self, wrong: Iterable[str] = ()) -> None:
        self.wrong = set(wrong)
        self.problems: list[str] = []

    @contextlib.contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Keep what goes wrong inside."""
        try:
            yield
        except PolyfedError as error:
            self.problems.append(str(error))
            self.wrong.add(key)


def check_texts(settings: Settings, found: Findings) -> None:
    """Names and options of everything that is written as text."""
    check_method(settings, found)
    with found.about("data"):
        check_data(settings.data)
    with found.about("model"):
        check_model(settings.model)
    with found.about("partition"):
        check_call(partitions, settings.partition)
    if settings.loss != AUTO:
        with found.about("loss"):
            check_call(losses, settings.loss)
    with found.about("backend"):
        require_known(settings.backend)
    for domain in settings.unseen:
        with found.about("unseen"):
            check_domain(settings.data, domain)


def check_method(settings: Settings, found: Findings) -> None:
    """Each part on its own, then all of them joined."""
    for file in settings.load:
        with found.about("load"):
            load_file(file, settings.trust)
    parts: list[Method] = []
    with found.about("method"):
        for call in read_sum(settings.method):
            with found.about("method"):
                record = methods.find(call.name)
                check_options(record, call)
                parts += record.extra["build_with"](*call.positional, **call.named).parts
    if not found.wrong & {"load", "method"}:
        with found.about("method"):
            join(parts)


def check_call(registry: Registry[Any], text: str) -> Recorded[Any]:
    """A name that a registry knows, with options it has; what the run gives is left out."""
    call = read_call(text)
    record = registry.find(call.name)
    check_options(record, call)
    return record


def check_options(record: Recorded[Any], call: Call) -> None:
    """The written options have the right names and plain types."""
    parameters = record.signature.parameters
    taken = [key for key in call.named if key in GIVEN_BY_RUN and key in parameters]
    if taken:
        raise OptionError(f"{record.name}: {', '.join(taken)} is set by the run, not in the text.")
    free = [parameter for key, parameter in parameters.items() if key not in GIVEN_BY_RUN]
    dataclasses.replace(record, signature=inspect.Signature(free)).bind(call)


def check_data(text: str) -> None:
    """A registered data set with options it can use; a folder is not looked at, and files are not needed."""
    if is_path(text):
        return
    if needs_no_files(check_call(data_sets, text)):
        embedded(text)
        return
    # Options are read before files; an empty folder lets the one be refused and the other be missing.
    with tempfile.TemporaryDirectory() as empty, contextlib.suppress(DataError):
        data_sets.build(text, root=empty)


def is_path(text: str) -> bool:
    """Whether data are written as a path, or are one."""
    return "/" in text.split("(")[0] or is_own_data(text)


def check_model(text: str | None) -> None:
    """A registered model; those of timm or of a user's module are found when the run starts."""
    if text is not None and ":" not in text.split("(")[0]:
        check_call(models, text)


def check_domain(data: str, domain: str) -> None:
    """The data set has this domain, where its domains are known."""
    known = known_domains(data)
    if known and domain not in known:
        raise DataError(f"{data} has no domain {domain!r}. {nearest(domain, known)}")


def known_domains(data: str) -> tuple[str, ...]:
    """The domains a data set can have, under all names; empty where they are not known without its files."""
    if is_path(data):
        return ()
    record = record_of(data)
    if record is None:
        return ()
    declaration = declaration_of(record)
    if declaration is not None:
        expected = (name for domains in declaration.expected.values() for name in domains)
        return tuple(dict.fromkeys([*declaration.domains, *expected]))
    return tuple(domain.name for domain in embedded(data).domains) if needs_no_files(record) else ()


def record_of(data: str) -> Recorded[DataSet] | None:
    """The registered data set; None for a folder and for what check_data refuses."""
    if is_path(data):
        return None
    try:
        return check_call(data_sets, data)
    except PolyfedError:
        return None


def declaration_of(record: Recorded[DataSet]) -> Declaration | None:
    """What a data set that is read from files declares; None for others and for a folder of the user's own."""
    declaration: Declaration | None = record.extra.get("declaration")
    return declaration


def needs_no_files(record: Recorded[DataSet]) -> bool:
    """Whether a data set is made from what is installed."""
    return "root" not in record.signature.parameters


@functools.cache
def embedded(text: str) -> DataSet:
    """A data set that needs no files, built."""
    return data_sets.build(text)


def check_together(settings: Settings, found: Findings) -> None:
    """What needs several settings at once: the domains split among clients, and the loss, the model and the method on them."""
    record = record_of(settings.data)
    if record is None or (declaration_of(record) is None and not needs_no_files(record)):
        return
    real = needs_no_files(record)
    if real and "data" in found.wrong:
        return
    data = embedded(settings.data) if real else blank_data(settings.data, record, settings.unseen)
    if "unseen" not in found.wrong:
        with found.about("unseen"):
            split_data(data, dataclasses.replace(settings, partition="domain"), real=True)
    if "unseen" in found.wrong:
        settings = dataclasses.replace(settings, unseen=(), few_shot=0)
    if "partition" not in found.wrong:
        with found.about("partition"):
            clients = len(split_data(data, settings, real).clients)
            with found.about("clients_per_round"):
                settings.sampled(clients)
    if real:
        federation = split_data(data, dataclasses.replace(settings, partition="domain", few_shot=0), real)
    else:
        federation = blank_federation(settings.data, record, settings.unseen)
    check_on_model(settings, federation, real, found)


def check_on_model(settings: Settings, federation: Federation, real: bool, found: Findings) -> None:
    """The loss with these classes, and the method on the model, where it is known which model that is."""
    if "loss" not in found.wrong:
        with found.about("loss"):
            build_loss(settings.loss, federation)
    if "loss" in found.wrong:
        settings = dataclasses.replace(settings, loss=Settings.loss)
    unknown = ":" in (settings.model or "").split("(")[0] or (settings.model is None and not real)
    if unknown or found.wrong & {"method", "model", "load"}:
        return
    method = parse(settings.method)
    with found.about("method"):
        population = federation if method.population is None else method.population(federation)
        build_bench(settings, method, population, prepared_model(settings, method, population, None, None))


def split_data(data: DataSet, settings: Settings, real: bool) -> Federation:
    """The data split among clients."""
    try:
        return federate(data, settings.partition, settings.unseen, settings.seed, settings.few_shot, settings.unseen_part)
    except DataError:
        if real:
            raise
        # The files may hold more, or natural ids; only they can say.
        return federate(data, "domain", settings.unseen)
