"""What a node says of itself, checked by a schema: every value has a type and bounds, names are plain text, and nothing names code.

The server builds tables, placeholders and a model from descriptions, so none of them is believed further than this.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from polyfed.data.federation_summary import INPUT_TYPES
from polyfed.errors import DataError
from polyfed.extras import shown
from polyfed.flower.wire.message import PROTOCOL, BadMessage
from polyfed.tasks.known import TASKS, task_named
from polyfed.trust import names_function

Reader: TypeAlias = Callable[[object, str], Any]
"""Checks a value and returns it; the second argument is what the value is called in errors."""
LONGEST_NAME, LONGEST_TEXT = 200, 1000
MAX_CLASSES, MAX_DOMAINS, MAX_SIDES, MAX_CHANNELS = 100_000, 1000, 4, 4096
MAX_SAMPLES = 10_000_000
"""Of one node. The server holds a label for each; a node that says more is mistaken, or wants the others to count for nothing."""
LARGEST_INPUT = 2**28
MUST_AGREE = ("protocol", "polyfed")
"""Versions that must be the same; another torch is only reported, since its results differ in the last bits."""


def own_versions() -> dict[str, str]:
    """The versions that both ends tell each other."""
    return {"protocol": str(PROTOCOL), "polyfed": _version("polyfed"), "torch": _version("torch")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source folder
        return "unknown"


def version_problem(theirs: Mapping[str, str]) -> str:
    """Why two ends cannot work together; empty where they can."""
    mine = own_versions()
    other = [f"{name} {theirs.get(name, 'unknown')} (here {mine[name]})" for name in MUST_AGREE if theirs.get(name) != mine[name]]
    return f"it has another version of {', '.join(other)}; install the same on every machine" if other else ""


def plain_text(text: str) -> str:
    r"""Text without control characters and others that cannot be seen.

    >>> plain_text("ward\x1b[31m 7\u202e")
    'ward[31m 7'
    """
    return "".join(letter for letter in text if not unicodedata.category(letter).startswith("C"))


# ----------------------------------------------------------------------------------------------------------- the schema
def _text(value: object, what: str, longest: int = LONGEST_TEXT) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{what} takes text of at most {longest} letters, found {shown(value)}")
    return plain_text(value)


def _name(value: object, what: str) -> str:
    text = _text(value, what, LONGEST_NAME).strip()
    if not text:
        raise ValueError(f"{what} is an empty name")
    return text


def _model(value: object, what: str) -> str:
    """The data set's own model, by a name of polyfed's. A name of code is no answer: what the server runs, its own recipe says."""
    text = _text(value, what)
    return "" if names_function(text) else text


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SAMPLES:
        raise ValueError(f"{what} takes counts from 0 to {MAX_SAMPLES}, found {shown(value)}")
    return value


def _finite(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 <= value <= 1e6:
        raise ValueError(f"{what} takes numbers up to 1e6 in magnitude, found {shown(value)}")
    return float(value)


def _one_of(known: Container[str]) -> Reader:
    def read(value: object, what: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"there is no {what} {shown(value)}")
        return value

    return read


def _several(of: Reader, least: int, most: int) -> Reader:
    def read(value: object, what: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise ValueError(f"{what} takes a list of {least} to {most} values, found {shown(value)}")
        return tuple(of(item, what) for item in value)

    return read


def _table(of: Reader, most: int) -> Reader:
    def read(value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"{what} takes a table of at most {most} rows, found {shown(value)}")
        return {_name(name, what): of(item, what) for name, item in value.items()}

    return read


def _told(read: Reader, **default: Any) -> Any:
    return field(metadata={"read": read}, **default)


@dataclass(frozen=True)
class Description:
    """What a node says of itself: names and numbers, no examples."""

    client: str = _told(_name)
    domains: tuple[str, ...] = _told(_several(_name, 1, MAX_DOMAINS))
    name: str = _told(_name)
    source: str = _told(_text)
    default_model: str = _told(_model)
    task: str = _told(_one_of(TASKS))
    classes: tuple[str, ...] = _told(_several(_name, 1, MAX_CLASSES))
    class_counts: tuple[int, ...] = _told(_several(_count, 0, MAX_CLASSES))
    input_shape: tuple[int, ...] = _told(_several(_count, 1, MAX_SIDES))
    input_type: str = _told(_one_of(INPUT_TYPES))
    mean: tuple[float, ...] = _told(_several(_finite, 0, MAX_CHANNELS))
    std: tuple[float, ...] = _told(_several(_finite, 0, MAX_CHANNELS))
    tests: Mapping[str, int] = _told(_table(_count, MAX_DOMAINS))
    validation: int | None = _told(lambda value, what: None if value is None else _count(value, what))
    samples: int = _told(_count)
    torch: str = ""
    middle_square: bool = False

    @classmethod
    def read(cls, values: object) -> Description:
        """A description as it came over the wire; what is outside the schema is refused."""
        if not isinstance(values, dict):
            raise BadMessage("it does not describe itself")
        try:
            versions = _table(lambda text, what: _text(text, what, LONGEST_NAME), 10)(values["versions"], "versions")
            if problem := version_problem(versions):
                raise ValueError(problem)
            readers = {item.name: item.metadata["read"] for item in fields(cls) if item.metadata}
            found = cls(
                **{name: read(values[name], name) for name, read in readers.items()},
                torch=versions.get("torch", ""),
                middle_square=values.get("middle_square") is True,
            )
            found._require_consistent()
        except KeyError as error:
            raise BadMessage(f"its description has no {error.args[0]}") from error
        except ValueError as error:
            raise BadMessage(f"its description cannot be used: {error}") from error
        return found

    def _require_consistent(self) -> None:
        classes = len(set(self.classes))
        if problem := task_named(self.task).problem_with_counts(self.class_counts, self.samples, classes):
            raise ValueError(problem)
        if classes != len(self.classes):
            raise ValueError(f"{len(self.classes)} classes, but {classes} different ones")
        if self.samples == 0:
            raise ValueError("it has no training examples")
        if not 0 < math.prod(self.input_shape) <= LARGEST_INPUT:
            raise ValueError(f"input_shape {self.input_shape} is empty or too large")
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise ValueError("std takes a positive number for each of mean")

    def data_kind(self, own_model: bool) -> tuple[object, ...]:
        """What must be the same at all nodes of a run; their own model too, where the run names none."""
        model = self.default_model if own_model else ""
        return self.task, self.classes, self.input_shape, self.input_type, self.mean, self.std, model


# ------------------------------------------------------------------------------------------------------ nodes together
def those_that_fit(nodes: Mapping[int, Description], own_model: bool = False) -> tuple[dict[int, Description], dict[int, str]]:
    """The nodes that can train one model, and why the others are left out.

    Those stay that most nodes agree with; without a majority nobody can say who is odd, which is an error. With ``own_model`` the run trains
    the data's own model, so nodes must agree on it as well.
    """
    ranked = Counter(node.data_kind(own_model) for node in nodes.values()).most_common(2)
    first = {node.data_kind(own_model): node for node in reversed(list(nodes.values()))}
    usual = first[ranked[0][0]]
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        raise DataError(_difference(usual, first[ranked[1][0]]))
    odd = {number: node for number, node in nodes.items() if node.data_kind(own_model) != ranked[0][0]}
    fit = {number: node for number, node in nodes.items() if number not in odd}
    return fit, {number: _difference(usual, node) for number, node in odd.items()}


def _difference(usual: Description, other: Description) -> str:
    """In what the data of a node differ from the usual."""
    if other.task != usual.task:
        return f"{usual.client} has data for {usual.task}, {other.client} for {other.task}. All nodes need the same task."
    if other.classes != usual.classes:
        return (
            f"{usual.client} has the classes {_few(usual.classes)}, {other.client} has {_few(other.classes)}. "
            "All nodes need the same classes in the same order."
        )
    if other.input_shape != usual.input_shape:
        return (
            f"Inputs of {usual.client} have the shape {usual.input_shape}, those of {other.client} {other.input_shape}. "
            "All nodes need the same."
        )
    if other.data_kind(False) != usual.data_kind(False):
        return (
            f"{usual.client} scales its inputs by mean {usual.mean} and deviation {usual.std} ({usual.input_type}), {other.client} "
            f"by {other.mean} and {other.std} ({other.input_type}). All nodes need the same normalisation."
        )
    models = [
        f"the model {node.default_model}"
        if node.default_model
        else "a model by the name of code, which nodes may not name to the server"
        for node in (usual, other)
    ]
    return (
        f"The data of {usual.client} bring {models[0]}, those of {other.client} {models[1]}. "
        "All nodes need the same where the run names no model."
    )


def _few(names: Sequence[str]) -> str:
    few = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"{', '.join(few)} ({len(names)})"
