"""Declarations of the extras in client replies: type, shape, range and size. ``core/replies.py`` checks replies against them.

    Method(..., reply_extras={"train": {"steps": Number(minimum=1, maximum=1e6)}, "my_request": {"style": Array(style_shape)}})

Bounds, shapes and names can be functions of ``polyfed.RequestContext``: the server, the request and the client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

LARGEST = 1e15
"""Largest magnitude of a value in a model or an extra. Sums and squares of such values are finite in single precision."""

SHOWN = 60


V = TypeVar("V")
Shape: TypeAlias = tuple[int, ...]
From: TypeAlias = "V | Callable[[Any], V]"
"""A value, or a function of the request context that returns it."""


def resolve(value: From[V], context: Any) -> V:
    return value(context) if callable(value) else value


class Extra(Protocol):
    """Declared form of one extra."""

    @property
    def required(self) -> bool:
        """True if every reply must have it."""

    def problem(self, value: Any, context: Any) -> str:
        """Return the reason why the value does not have this form, or an empty string. Inspects only what the form declares, and never raises."""


@dataclass(frozen=True)
class Number:
    """A finite number between two bounds, both included."""

    minimum: From[float] = -LARGEST
    maximum: From[float] = LARGEST
    whole: bool = False
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        kind = "an integer" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return f"is {type(value).__name__}, expected {kind}"
        minimum, maximum = resolve(self.minimum, context), resolve(self.maximum, context)
        return "" if minimum <= value <= maximum else f"is {shown(value)}, expected {kind} between {minimum:g} and {maximum:g}"


@dataclass(frozen=True)
class Flag:
    """True or False."""

    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        return "" if isinstance(value, bool) else f"is {type(value).__name__}, expected True or False"


@dataclass(frozen=True)
class Text:
    """A string of limited length, or one of several choices."""

    longest: int = 200
    choices: From[Collection[str]] | None = None
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        if not isinstance(value, str):
            return f"is {type(value).__name__}, expected text"
        if len(value) > self.longest:
            return f"has {len(value)} characters, expected at most {self.longest}"
        if self.choices is not None and value not in (choices := resolve(self.choices, context)):
            return f"is {shown(value)}, expected one of {', '.join(map(shown, list(choices)[:5]))}"
        return ""


@dataclass(frozen=True)
class Array:
    """A dense tensor of one shape and type (or one of several, given as lists), with finite values between two bounds.

    ``further`` returns any other problem of a tensor that fulfils all this, or an empty string.
    """

    shape: From[Shape | list[Shape]]
    dtype: From[torch.dtype | list[torch.dtype]] = torch.float32
    minimum: From[float] = -LARGEST
    maximum: From[float] = LARGEST
    further: Callable[[Tensor], str] | None = None
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        shape = self.shape(context) if callable(self.shape) else self.shape
        dtype = self.dtype(context) if callable(self.dtype) else self.dtype
        return (
            problem_with_tensor(value, shape, dtype, context.devices)
            or problem_with_values(value, resolve(self.minimum, context), resolve(self.maximum, context))
            or ("" if self.further is None else self.further(value))
        )


@dataclass(frozen=True)
class LikeEntries:
    """A mapping from the entries in ``names`` to tensors of their shapes and types; with ``or_none`` it can also be empty."""

    names: From[Sequence[str]]
    or_none: bool = False
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping from entry names to tensors"
        names = resolve(self.names, context)
        if not value and self.or_none:
            return ""
        if problem := _problem_with_names(value, names, names):
            return f"is invalid: {problem}"
        for name in names:
            entry = context.plan.entries[name]
            misfit = problem_with_tensor(value[name], entry.shape, entry.dtype, context.devices) or problem_with_values(value[name])
            if misfit:
                return f"has {shown(name)}, which {misfit}"
        return ""


@dataclass(frozen=True)
class MappingOf:
    """A mapping from some of ``keys`` to values of one form."""

    value: Extra
    keys: From[Collection[str]]
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping"
        if problem := _problem_with_names(value, (), resolve(self.keys, context)):
            return f"is invalid: {problem}"
        return next(
            (f"has {shown(key)}, which {why}" for key, item in value.items() if (why := self.value.problem(item, context))), ""
        )


@dataclass(frozen=True)
class Record:
    """A mapping with one form per name."""

    fields: Mapping[str, Extra]
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        if not isinstance(value, Mapping):
            return f"is {type(value).__name__}, expected a mapping"
        why = problem_with_extras(value, self.fields, context)
        return f"is invalid: {why}" if why else ""


@dataclass(frozen=True)
class ListOf:
    """A list or tuple of limited length, with items of one form."""

    value: Extra
    longest: From[int]
    required: bool = True

    def problem(self, value: Any, context: Any) -> str:
        if not isinstance(value, list | tuple):
            return f"is {type(value).__name__}, expected a list"
        longest = resolve(self.longest, context)
        if len(value) > longest:
            return f"has {len(value)} items, expected at most {longest}"
        return next(
            (f"has an item {i} that {why}" for i, item in enumerate(value) if (why := self.value.problem(item, context))), ""
        )


def problem_with_extras(extras: Mapping[Any, Any], declared: Mapping[str, Extra], context: Any) -> str:
    """Return the reason why extras do not match their declaration, or an empty string."""
    required = [name for name, form in declared.items() if form.required]
    if problem := _problem_with_names(extras, required, declared):
        return problem
    return next((f"{name!r} {why}" for name, value in extras.items() if (why := declared[name].problem(value, context))), "")


def _problem_with_names(given: Mapping[Any, Any], required: Collection[str], allowed: Collection[str]) -> str:
    """Return why a mapping does not have the right keys. Only strings are compared: the comparison of other keys may raise."""
    unknown = next((key for key in given if not isinstance(key, str) or key not in allowed), None)
    if unknown is not None or None in given:
        return f"{shown(unknown)} is not declared"
    missing = next((name for name in required if name not in given), None)
    return "" if missing is None else f"{missing!r} is missing"


def problem_with_tensor(
    value: Any, shape: Shape | list[Shape], dtype: torch.dtype | list[torch.dtype], devices: Collection[str]
) -> str:
    """Return why a value is not a dense tensor of this shape and type (or one of these). Its numbers are not checked."""
    if problem := problem_with_layout(value, devices):
        return problem
    shapes = shape if isinstance(shape, list) else [shape]
    if tuple(value.shape) not in shapes:
        return f"has the shape {shown(tuple(value.shape))}, expected {' or '.join(map(str, shapes[:5]))}"
    dtypes = dtype if isinstance(dtype, list) else [dtype]
    return "" if value.dtype in dtypes else f"has the type {value.dtype}, expected {' or '.join(map(str, dtypes))}"


def problem_with_layout(value: Any, devices: Collection[str]) -> str:
    """Return why a value is not an ordinary dense tensor, whose shape and numbers can be checked."""
    if not isinstance(value, Tensor):
        return f"is {type(value).__name__}, expected a tensor"
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        layout = "nested" if value.is_nested else "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"is a {layout} tensor, expected a dense one"
    if value.device.type not in devices:
        return f"is on the device {value.device}, expected {' or '.join(sorted(devices))}"
    return "has requires_grad set; send value.detach()" if value.requires_grad else ""


def problem_with_values(value: Tensor, minimum: float = -LARGEST, maximum: float = LARGEST) -> str:
    """Return why the numbers of an ordinary tensor are not finite or not within two bounds. Integers have no default bounds."""
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
        return "has values that are not finite"
    return f"has values from {float(low):g} to {float(high):g}, expected {minimum:g} to {maximum:g}"


def shown(value: Any) -> str:
    """Format a value for a message, shortened. Huge integers are not written out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, str | int | float | bool | tuple | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
