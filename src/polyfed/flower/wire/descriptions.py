"""What a node says of itself, checked by a schema: every value has a type and bounds, names are plain text, and nothing names code.

The server builds tables, placeholders and a model from descriptions, so none of them is believed further than this.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from polyfed.core.extras import shown
from polyfed.core.tasks.known import TASKS, task_named
from polyfed.data.federation_summary import INPUT_TYPES
from polyfed.errors import DataError
from polyfed.flower.wire.message import PROTOCOL, BadMessage
from polyfed.trust import names_function

T = TypeVar("T")
LONGEST_NAME, LONGEST_TEXT = 200, 1000
MOST_CLASSES, MOST_DOMAINS, MOST_SIDES, MOST_CHANNELS = 100_000, 1000, 4, 4096
MOST_SAMPLES = 10_000_000
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


@dataclass(frozen=True)
class Description:
    """What a node says of itself: names and numbers, no examples."""

    client: str
    domains: tuple[str, ...]
    name: str
    source: str
    default_model: str
    task: str
    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    input_shape: tuple[int, ...]
    input_type: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tests: Mapping[str, int]
    validation: int | None
    samples: int
    torch: str = ""
    middle_square: bool = False

    @classmethod
    def read(cls, values: object) -> Description:
        """A description as it came over the wire; what is outside the schema is refused."""
        if not isinstance(values, dict):
            raise BadMessage("it does not describe itself")
        try:
            return _read(values)
        except KeyError as error:
            raise BadMessage(f"its description has no {error.args[0]}") from error
        except ValueError as error:
            raise BadMessage(f"its description cannot be used: {error}") from error


def _read(values: Mapping[str, Any]) -> Description:
    versions = _mapping(values["versions"], "versions", lambda text, what: _text(text, what, LONGEST_NAME), 10)
    if problem := version_problem(versions):
        raise ValueError(problem)
    found = Description(
        client=_name(values["client"], "client"),
        domains=_several(values["domains"], "domains", _name, 1, MOST_DOMAINS),
        name=_name(values["name"], "name"),
        source=_text(values["source"], "source", LONGEST_TEXT),
        default_model=_model(values["default_model"]),
        task=_known_task(values["task"]),
        classes=_several(values["classes"], "classes", _name, 1, MOST_CLASSES),
        class_counts=_several(values["class_counts"], "class_counts", _count, 0, MOST_CLASSES),
        input_shape=_several(values["input_shape"], "input_shape", _count, 1, MOST_SIDES),
        input_type=_known_type(values["input_type"]),
        mean=_several(values["mean"], "mean", _finite, 0, MOST_CHANNELS),
        std=_several(values["std"], "std", _finite, 0, MOST_CHANNELS),
        tests=_mapping(values["tests"], "tests", _count, MOST_DOMAINS),
        validation=None if values["validation"] is None else _count(values["validation"], "validation"),
        samples=_count(values["samples"], "samples"),
        torch=versions.get("torch", ""),
        middle_square=values.get("middle_square") is True,
    )
    _require_consistent(found)
    return found


def _require_consistent(found: Description) -> None:
    if problem := task_named(found.task).problem_with_counts(found.class_counts, found.samples, len(set(found.classes))):
        raise ValueError(problem)
    if len(set(found.classes)) != len(found.classes):
        raise ValueError(f"{len(found.classes)} classes, but {len(set(found.classes))} different ones")
    if found.samples == 0:
        raise ValueError("it has no training examples")
    if not 0 < math.prod(found.input_shape) <= LARGEST_INPUT:
        raise ValueError(f"input_shape {found.input_shape} is empty or too large")
    if len(found.mean) != len(found.std) or any(value <= 0 for value in found.std):
        raise ValueError("std takes a positive number for each of mean")


def plain_text(text: str) -> str:
    r"""Text without control characters and others that cannot be seen.

    >>> plain_text("ward\x1b[31m 7\u202e")
    'ward[31m 7'
    """
    return "".join(letter for letter in text if not unicodedata.category(letter).startswith("C"))


def _text(value: object, what: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{what} takes text of at most {longest} letters, found {shown(value)}")
    return plain_text(value)


def _name(value: object, what: str) -> str:
    text = _text(value, what, LONGEST_NAME).strip()
    if not text:
        raise ValueError(f"{what} is an empty name")
    return text


def _model(value: object) -> str:
    """The data set's own model, by a name of polyfed's. A name of code is no answer: what the server runs, its own recipe says."""
    text = _text(value, "default_model", LONGEST_TEXT)
    return "" if names_function(text) else text


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SAMPLES:
        raise ValueError(f"{what} takes counts from 0 to {MOST_SAMPLES}, found {shown(value)}")
    return value


def _finite(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 <= value <= 1e6:
        raise ValueError(f"{what} takes numbers up to 1e6 in magnitude, found {shown(value)}")
    return float(value)


def _known_type(value: object) -> str:
    if not isinstance(value, str) or value not in INPUT_TYPES:
        raise ValueError(f"there is no input_type {shown(value)}")
    return value


def _known_task(value: object) -> str:
    if not isinstance(value, str) or value not in TASKS:
        raise ValueError(f"there is no task {shown(value)}")
    return value


def _several(value: object, what: str, read: Callable[[object, str], T], least: int, most: int) -> tuple[T, ...]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise ValueError(f"{what} takes a list of {least} to {most} values, found {shown(value)}")
    return tuple(read(item, what) for item in value)


def _mapping(value: object, what: str, read: Callable[[object, str], T], most: int) -> dict[str, T]:
    if not isinstance(value, dict) or len(value) > most:
        raise ValueError(f"{what} takes a table of at most {most} rows, found {shown(value)}")
    return {_name(name, what): read(item, what) for name, item in value.items()}


# ------------------------------------------------------------------------------------------------------ nodes together
def those_that_fit(nodes: Mapping[int, Description], own_model: bool = False) -> tuple[dict[int, Description], dict[int, str]]:
    """The nodes that can train one model, and why the others are left out.

    Those stay that most nodes agree with; without a majority nobody can say who is odd.

    Args:
        nodes: by their numbers.
        own_model: whether the run trains the data's own model, so that nodes must agree on it as well.
    """
    fit = dict(nodes)
    problems: dict[int, str] = {}
    usual = usual_kind(list(fit.values()), own_model)
    for node, described in list(fit.items()):
        if why := difference(usual, described, own_model):
            problems[node] = why
            del fit[node]
    return fit, problems


def usual_kind(nodes: Sequence[Description], own_model: bool = False) -> Description:
    """The first of the nodes whose data most others share; an error where two kinds are equally frequent."""
    kinds = Counter(_kind(node, own_model) for node in nodes)
    ranked = kinds.most_common(2)
    first = {_kind(node, own_model): node for node in reversed(nodes)}
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        raise DataError(difference(first[ranked[0][0]], first[ranked[1][0]], own_model))
    return first[ranked[0][0]]


def _kind(node: Description, own_model: bool) -> tuple[object, ...]:
    return (*_data_kind(node), node.default_model if own_model else "")


def _data_kind(node: Description) -> tuple[object, ...]:
    return node.task, node.classes, node.input_shape, node.input_type, node.mean, node.std


def difference(usual: Description, other: Description, own_model: bool = False) -> str:
    """In what the data of a node differ from the usual; empty where they do not."""
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
    if _data_kind(other) != _data_kind(usual):
        return (
            f"{usual.client} scales its inputs by mean {usual.mean} and deviation {usual.std} ({usual.input_type}), {other.client} "
            f"by {other.mean} and {other.std} ({other.input_type}). All nodes need the same normalisation."
        )
    if own_model and other.default_model != usual.default_model:
        return (
            f"The data of {usual.client} bring {_shown_model(usual)}, those of {other.client} {_shown_model(other)}. "
            "All nodes need the same where the run names no model."
        )
    return ""


def _shown_model(node: Description) -> str:
    return (
        f"the model {node.default_model}"
        if node.default_model
        else "a model by the name of code, which nodes may not name to the server"
    )


def _few(names: Sequence[str]) -> str:
    few = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"{', '.join(few)} ({len(names)})"
