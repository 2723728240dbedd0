"""Node descriptions, checked against a schema: every value has a type and bounds, names are plain text, and no value names code."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from polyfed.core.data_types import DeepRanges
from polyfed.data.federation_summary import INPUT_TYPES
from polyfed.data.store.deep_ranges import read_ranges
from polyfed.errors import DataError
from polyfed.extras import shown
from polyfed.flower.wire.message import PROTOCOL, BadMessage
from polyfed.tasks.known import TASKS, task_named
from polyfed.trust import names_function

Reader: TypeAlias = Callable[[object, str], Any]  # checks and returns a value; the second argument is its name in errors
LONGEST_NAME, LONGEST_TEXT = 200, 1000
MAX_CLASSES, MAX_DOMAINS, MAX_SIDES, MAX_CHANNELS = 100_000, 1000, 4, 4096
MAX_SAMPLES = 10_000_000  # per node; a larger number would give the other nodes no weight
LARGEST_INPUT = 2**28
MUST_AGREE = ("protocol", "polyfed")  # another torch version only changes the last bits


def own_versions() -> dict[str, str]:
    return {"protocol": str(PROTOCOL), "polyfed": _version("polyfed"), "torch": _version("torch")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source folder
        return "unknown"


def version_problem(theirs: Mapping[str, str]) -> str:
    """Return the reason why server and node cannot work together, or an empty string."""
    mine = own_versions()
    other = [f"{name} {theirs.get(name, 'unknown')} (here {mine[name]})" for name in MUST_AGREE if theirs.get(name) != mine[name]]
    return f"its versions differ: {', '.join(other)}; install the same version on every machine" if other else ""


def plain_text(text: str) -> str:
    r"""Remove control characters and other invisible characters.

    >>> plain_text("ward\x1b[31m 7\u202e")
    'ward[31m 7'
    """
    return "".join(character for character in text if not unicodedata.category(character).startswith("C"))


def _text(value: object, what: str, longest: int = LONGEST_TEXT) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{what} must be text of at most {longest} characters, got {shown(value)}")
    return plain_text(value)


def _name(value: object, what: str) -> str:
    text = _text(value, what, LONGEST_NAME).strip()
    if not text:
        raise ValueError(f"{what} is empty")
    return text


def _model(value: object, what: str) -> str:
    text = _text(value, what)
    # A node may not choose code that the server imports.
    return "" if names_function(text) else text


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SAMPLES:
        raise ValueError(f"{what} must be counts from 0 to {MAX_SAMPLES}, got {shown(value)}")
    return value


def _finite(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 <= value <= 1e6:
        raise ValueError(f"{what} must be numbers up to 1e6 in magnitude, got {shown(value)}")
    return float(value)


def _one_of(known: Container[str]) -> Reader:
    def read(value: object, what: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"unknown {what} {shown(value)}")
        return value

    return read


def _list(of: Reader, minimum: int, maximum: int) -> Reader:
    def read(value: object, what: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not minimum <= len(value) <= maximum:
            raise ValueError(f"{what} must be a list of {minimum} to {maximum} values, got {shown(value)}")
        return tuple(of(item, what) for item in value)

    return read


def _table(of: Reader, maximum: int) -> Reader:
    def read(value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > maximum:
            raise ValueError(f"{what} must be a table of at most {maximum} rows, got {shown(value)}")
        return {_name(name, what): of(item, what) for name, item in value.items()}

    return read


def _checked(read: Reader) -> Any:
    return field(metadata={"read": read})


@dataclass(frozen=True)
class Description:
    """A node's description of itself: names and numbers, no examples."""

    client: str = _checked(_name)
    domains: tuple[str, ...] = _checked(_list(_name, 1, MAX_DOMAINS))
    name: str = _checked(_name)
    source: str = _checked(_text)
    default_model: str = _checked(_model)
    task: str = _checked(_one_of(TASKS))
    classes: tuple[str, ...] = _checked(_list(_name, 1, MAX_CLASSES))
    class_counts: tuple[int, ...] = _checked(_list(_count, 0, MAX_CLASSES))
    input_shape: tuple[int, ...] = _checked(_list(_count, 1, MAX_SIDES))
    input_type: str = _checked(_one_of(INPUT_TYPES))
    mean: tuple[float, ...] = _checked(_list(_finite, 0, MAX_CHANNELS))
    std: tuple[float, ...] = _checked(_list(_finite, 0, MAX_CHANNELS))
    tests: Mapping[str, int] = _checked(_table(_count, MAX_DOMAINS))
    validation: int | None = _checked(lambda value, what: None if value is None else _count(value, what))
    samples: int = _checked(_count)
    torch: str = ""
    middle_square: bool = False
    deep_ranges: DeepRanges = field(default_factory=dict)

    @classmethod
    def read(cls, values: object) -> Description:
        """Read a received description and check it against the schema."""
        if not isinstance(values, dict):
            raise BadMessage("its description is not a table")
        try:
            versions = _table(lambda text, what: _text(text, what, LONGEST_NAME), 10)(values["versions"], "versions")
            if problem := version_problem(versions):
                raise ValueError(problem)
            readers = {item.name: item.metadata["read"] for item in fields(cls) if item.metadata}
            found = cls(
                **{name: read(values[name], name) for name, read in readers.items()},
                torch=versions.get("torch", ""),
                middle_square=values.get("middle_square") is True,
                deep_ranges=_table(lambda found, what: read_ranges({"": found})[""], MAX_DOMAINS)(
                    values.get("deep_ranges", {}), "deep_ranges"
                ),
            )
            found._require_consistent()
        except KeyError as error:
            raise BadMessage(f"its description has no {error.args[0]}") from error
        except ValueError as error:
            raise BadMessage(f"its description is invalid: {error}") from error
        return found

    def _require_consistent(self) -> None:
        classes = len(set(self.classes))
        if problem := task_named(self.task).problem_with_counts(self.class_counts, self.samples, classes):
            raise ValueError(problem)
        if classes != len(self.classes):
            raise ValueError(f"{len(self.classes)} classes, of which {classes} are distinct")
        if self.samples == 0:
            raise ValueError("it has no training examples")
        if not 0 < math.prod(self.input_shape) <= LARGEST_INPUT:
            raise ValueError(f"input_shape {self.input_shape} is empty or too large")
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise ValueError("std must have a positive number for each mean")

    def data_kind(self, own_model: bool) -> tuple[object, ...]:
        """Return what must be equal at all nodes of a run, including the default model if ``own_model``."""
        model = self.default_model if own_model else ""
        return self.task, self.classes, self.input_shape, self.input_type, self.mean, self.std, model


def split_by_majority(nodes: Mapping[int, Description], own_model: bool) -> tuple[dict[int, Description], dict[int, str]]:
    """Return the nodes that agree with the majority, and the reasons why the others do not fit; no majority is an error."""
    ranked = Counter(node.data_kind(own_model) for node in nodes.values()).most_common(2)
    first = {node.data_kind(own_model): node for node in reversed(list(nodes.values()))}
    usual = first[ranked[0][0]]
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        raise DataError(_difference(usual, first[ranked[1][0]]))
    odd = {number: node for number, node in nodes.items() if node.data_kind(own_model) != ranked[0][0]}
    fit = {number: node for number, node in nodes.items() if number not in odd}
    return fit, {number: _difference(usual, node) for number, node in odd.items()}


def _difference(usual: Description, other: Description) -> str:
    if other.task != usual.task:
        return f"{usual.client} has data for {usual.task}, {other.client} for {other.task}. All nodes need the same task."
    if other.classes != usual.classes:
        return (
            f"{usual.client} has the classes {_shortened(usual.classes)}, {other.client} has {_shortened(other.classes)}. "
            "All nodes need the same classes in the same order."
        )
    if other.input_shape != usual.input_shape:
        return (
            f"{usual.client} has inputs of shape {usual.input_shape}, {other.client} of shape {other.input_shape}. "
            "All nodes need the same shape."
        )
    if other.data_kind(False) != usual.data_kind(False):
        return (
            f"{usual.client} normalises its inputs with mean {usual.mean} and standard deviation {usual.std} ({usual.input_type}), {other.client} "
            f"with {other.mean} and {other.std} ({other.input_type}). All nodes need the same normalisation."
        )
    models = [node.default_model or "custom code, which nodes may not choose for the server" for node in (usual, other)]
    return (
        f"The default model of {usual.client} is {models[0]}; that of {other.client} is {models[1]}. "
        "All nodes need the same default model, unless the run specifies a model."
    )


def _shortened(names: Sequence[str]) -> str:
    few = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"{', '.join(few)} ({len(names)})"
