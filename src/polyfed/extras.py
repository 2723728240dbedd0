"""What a method declares of the extras in its clients' replies: type, shape, range and size. The core checks them (``core/replies.py``).

    Method(..., reply_extras={"train": {"steps": Number(minimum=1, maximum=1e6)}, "my_question": {"style": Array(style_shape)}})

Bounds, shapes and names may be functions of ``polyfed.RequestContext`` (``core/replies.py``): who was asked what, by which server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

LARGEST = 1e15
"""No value of a model or of an extra lies beyond it. Sums and squares of such values are finite in single precision."""

SHOWN = 60


V = TypeVar("V")
Shape: TypeAlias = tuple[int, ...]
From: TypeAlias = "V | Callable[[Any], V]"
"""A value, or a function that finds it from who was asked what."""


def found(value: From[V], asked: Any) -> V:
    return value(asked) if callable(value) else value


class Extra(Protocol):
    """The form of one extra."""

    @property
    def required(self) -> bool:
        """Whether every reply has it."""

    def problem(self, value: Any, asked: Any) -> str:
        """Why the value does not have this form; empty where it has. It looks no deeper than the form goes, and never raises."""


@dataclass(frozen=True)
class Number:
    """A finite number between two bounds, both included."""

    minimum: From[float] = -LARGEST
    maximum: From[float] = LARGEST
    whole: bool = False
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        kind = "a whole number" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return f"is {type(value).__name__}, expected {kind}"
        minimum, maximum = found(self.minimum, asked), found(self.maximum, asked)
        return "" if minimum <= value <= maximum else f"is {shown(value)}, expected {kind} between {minimum:g} and {maximum:g}"


@dataclass(frozen=True)
class Flag:
    """True or False."""

    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        return "" if isinstance(value, bool) else f"is {type(value).__name__}, expected True or False"


@dataclass(frozen=True)
class Text:
    """Text of limited length, or one of some texts."""

    longest: int = 200
    choices: From[Collection[str]] | None = None
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        if not isinstance(value, str):
            return f"is {type(value).__name__}, expected text"
        if len(value) > self.longest:
            return f"has {len(value)} characters, expected at most {self.longest}"
        if self.choices is not None and value not in (choices := found(self.choices, asked)):
            return f"is {shown(value)}, expected one of {', '.join(map(shown, list(choices)[:5]))}"
        return ""


@dataclass(frozen=True)
class Array:
    """A dense tensor of one shape and type (or one of several, given as lists), with finite values between two bounds.

    ``further`` may say what else is wrong with a tensor that fulfils all this.
    """

    shape: From[Shape | list[Shape]]
    dtype: From[torch.dtype | list[torch.dtype]] = torch.float32
    minimum: From[float] = -LARGEST
    maximum: From[float] = LARGEST
    further: Callable[[Tensor], str] | None = None
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        shape = self.shape(asked) if callable(self.shape) else self.shape
        dtype = self.dtype(asked) if callable(self.dtype) else self.dtype
        misfit = problem_with_tensor(value, shape, dtype, asked.devices)
        misfit = misfit or problem_with_values(value, found(self.minimum, asked), found(self.maximum, asked))
        return misfit or ("" if self.further is None else self.further(value))


@dataclass(frozen=True)
class LikeEntries:
    """A mapping from names of entries to tensors of their shapes and types: all of ``names``, or, where ``or_none``, nothing."""

    names: From[Sequence[str]]
    or_none: bool = False
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping from names of entries to tensors"
        names = found(self.names, asked)
        if not value and self.or_none:
            return ""
        if problem := _problem_with_names(value, names, names):
            return f"has a bad part: {problem}"
        for name in names:
            entry = asked.plan.entries[name]
            misfit = problem_with_tensor(value[name], entry.shape, entry.dtype, asked.devices) or problem_with_values(value[name])
            if misfit:
                return f"has {shown(name)}, which {misfit}"
        return ""


@dataclass(frozen=True)
class MappingOf:
    """A mapping from some of the texts in ``keys`` to values of one form."""

    value: Extra
    keys: From[Collection[str]]
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping"
        if problem := _problem_with_names(value, (), found(self.keys, asked)):
            return f"has a bad part: {problem}"
        return next(
            (f"has {shown(key)}, which {why}" for key, item in value.items() if (why := self.value.problem(item, asked))), ""
        )


@dataclass(frozen=True)
class Record:
    """A mapping with a form for each name."""

    fields: Mapping[str, Extra]
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping"
        why = problem_with_extras(value, self.fields, asked)
        return f"has a bad part: {why}" if why else ""


@dataclass(frozen=True)
class ListOf:
    """A list or tuple of limited length, whose items have one form."""

    value: Extra
    longest: From[int]
    required: bool = True

    def problem(self, value: Any, asked: Any) -> str:
        if not isinstance(value, list | tuple):
            return f"is {type(value).__name__}, expected a list"
        longest = found(self.longest, asked)
        if len(value) > longest:
            return f"has {len(value)} items, expected at most {longest}"
        return next((f"has an item {i} that {why}" for i, item in enumerate(value) if (why := self.value.problem(item, asked))), "")


def problem_with_extras(extras: Mapping[Any, Any], declared: Mapping[str, Extra], asked: Any) -> str:
    """Why these extras are not what was declared; empty where they are."""
    required = [name for name, form in declared.items() if form.required]
    if problem := _problem_with_names(extras, required, declared):
        return problem
    return next((f"{name!r} {why}" for name, value in extras.items() if (why := declared[name].problem(value, asked))), "")


def _problem_with_names(given: Mapping[Any, Any], required: Collection[str], allowed: Collection[str]) -> str:
    """Why a mapping does not have the right keys. Keys are compared as text only, since others may not even compare."""
    strange = next((key for key in given if not isinstance(key, str) or key not in allowed), None)
    if strange is not None or None in given:
        return f"{shown(strange)} is not declared"
    missing = next((name for name in required if name not in given), None)
    return "" if missing is None else f"{missing!r} is missing"


def problem_with_tensor(
    value: Any, shape: Shape | list[Shape], dtype: torch.dtype | list[torch.dtype], devices: Collection[str]
) -> str:
    """Why something is not a dense tensor of this shape and type (or one of these); values are not looked at."""
    if problem := problem_with_layout(value, devices):
        return problem
    shapes = shape if isinstance(shape, list) else [shape]
    if tuple(value.shape) not in shapes:
        return f"has the shape {shown(tuple(value.shape))}, expected {' or '.join(map(str, shapes[:5]))}"
    dtypes = dtype if isinstance(dtype, list) else [dtype]
    return "" if value.dtype in dtypes else f"has the type {value.dtype}, expected {' or '.join(map(str, dtypes))}"


def problem_with_layout(value: Any, devices: Collection[str]) -> str:
    """Why something is not an ordinary tensor, whose shape and values can be looked at."""
    if not isinstance(value, Tensor):
        return f"is {type(value).__name__}, expected a tensor"
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        layout = "nested" if value.is_nested else "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"is a {layout} tensor, expected a dense one"
    if value.device.type not in devices:
        return f"is on the device {value.device}, expected {' or '.join(sorted(devices))}"
    return "carries a computation (requires_grad), expected a value; send value.detach()" if value.requires_grad else ""


def problem_with_values(value: Tensor, minimum: float = -LARGEST, maximum: float = LARGEST) -> str:
    """Why the values of an ordinary tensor are not finite numbers between two bounds. Whole numbers have no usual bounds."""
    if (
        value.numel() == 0
        or value.dtype is torch.bool
        or (not value.is_floating_point() and not value.is_complex() and minimum == -LARGEST)
    ):
        return ""
    low, high = torch.view_as_real(value).aminmax() if value.is_complex() else value.aminmax()
    if bool(low >= minimum) and bool(high <= maximum):
        return ""
    if not (bool(torch.isfinite(low)) and bool(torch.isfinite(high))):
        return "holds values that are not finite"
    return f"holds values from {float(low):g} to {float(high):g}, expected {minimum:g} to {maximum:g}"


def shown(value: Any) -> str:
    """A value in a sentence, cut short. Whole numbers beyond measure are not written out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, str | int | float | bool | tuple | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
