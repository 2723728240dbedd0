"""Parser for expressions such as ``fedbn + agc(clip=1.28)``: sums of names with literal options, which are never evaluated.

Methods, models, data sets, partitions and schedules use the same syntax.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from polyfed.errors import TextError

Option: TypeAlias = "int | float | str | bool | tuple[Option, ...] | None"

LONGEST_TEXT = 4000
LARGEST_NUMBER = 2**63 - 1
SHOWN = 100


@dataclass(frozen=True)
class Call:
    """A name with options."""

    name: str
    positional: tuple[Option, ...] = ()
    named: Mapping[str, Option] = field(default_factory=dict)
    spelled: str = field(default="", compare=False)
    """Name in the user's spelling, for messages."""


def read_sum(text: str) -> list[Call]:
    """Parse ``a + b(x=1)`` into calls, in order.

    >>> [call.name for call in read_sum("fedbn + agc(clip=1.28)")]
    ['fedbn', 'agc']
    """
    calls: list[Call] = []
    read = _underscored(text)
    pending = [_parse(read)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            pending += [node.right, node.left]
        else:
            calls.append(_call(node, read, text))
    return calls


def read_call(text: str) -> Call:
    """Parse a single call. Hyphens in its name are read as underscores: ``digits-mini`` is ``digits_mini``."""
    read = _underscored(text)
    return _call(_parse(read), read, text)


def _characters(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the index of each character, the character, and True if it is outside brackets and quotes."""
    depth, quote = 0, ""
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        depth += 0 if quote else (char in "([") - (char in ")]")
        yield index, char, depth == 0 and not quote


def outside_brackets(text: str) -> str:
    """Return the characters outside brackets and quotes.

    >>> outside_brackets("a(at=(1, 2), b=3), c")
    'a, c'
    """
    return "".join(char for _, char, outside in _characters(text) if outside and char not in "()[]'\"")


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Split a text at separators outside brackets and quotes.

    >>> split_outside_brackets("constant, steps(at=(0.5, 0.75)), cosine")
    ['constant', 'steps(at=(0.5, 0.75))', 'cosine']
    """
    pieces = [""]
    for _, char, outside in _characters(text):
        if outside and char == separator:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces if piece.strip()]


def literal_or_text(text: str) -> Any:
    """Return the value of a literal, or any other text unchanged.

    >>> literal_or_text("0.5"), literal_or_text("cosine")
    (0.5, 'cosine')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _underscored(text: str) -> str:
    """Replace hyphens in names with underscores, outside brackets and quotes.

    >>> _underscored("fed-avg + group-norm(groups=-2)")
    'fed_avg + group_norm(groups=-2)'
    """
    return "".join(
        "_" if outside and char == "-" and re.match(r"\w-\w", text[max(index - 1, 0) : index + 2]) else char
        for index, char, outside in _characters(text)
    )


def write_call(name: str, options: Mapping[str, Option]) -> str:
    """Format a call so that it can be parsed again.

    >>> write_call("agc", {"clip": 1.28})
    'agc(clip=1.28)'
    """
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={write_option(value)}' for key, value in options.items())})"


def write_option(value: Option) -> str:
    """Format a literal."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        inner = ", ".join(write_option(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def _parse(text: str) -> ast.expr:
    if not text.strip():
        raise TextError("The expression is empty. Write a name, for example: fedbn + agc(clip=1.28)")
    if len(text) > LONGEST_TEXT:
        raise TextError(f"The expression has {len(text)} characters; the maximum is {LONGEST_TEXT}.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TextError(
            f"Cannot read {_shortened(text)!r}. Join names with +, and put options in brackets: fedbn + agc(clip=1.28)"
        ) from error


def _call(node: ast.expr, text: str, written: str) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id, spelled=ast.get_source_segment(written.strip(), node) or node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise TextError(
            f"Cannot read {_source(node, text)!r} in {_shortened(text)!r}: it is not a name with options, such as agc(clip=1.28)."
        )
    named: dict[str, Option] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise TextError(f"Cannot read ** in {text!r}: write each option by its name.")
        if keyword.arg in named:
            raise TextError(f"Cannot read {text!r}: {keyword.arg} is given twice.")
        named[keyword.arg] = _literal(keyword.value, text)
    spelled = ast.get_source_segment(written.strip(), node.func) or node.func.id
    return Call(node.func.id, tuple(_literal(argument, text) for argument in node.args), named, spelled)


def _literal(node: ast.expr, text: str) -> Option:
    try:
        return _frozen(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise TextError(
            f"Cannot use {_source(node, text)!r} in {_shortened(text)!r} as an option: options must be numbers, True or False, text in "
            f"quotes, or lists{f' ({error})' if isinstance(error, _TooLarge) else ''}."
        ) from error


class _TooLarge(ValueError):
    """A number that is too large or not finite."""


def _source(node: ast.expr, text: str) -> str:
    return _shortened(ast.get_source_segment(text.strip(), node) or text)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _frozen(value: object) -> Option:
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise _TooLarge("integers are limited to 2^63")
    if isinstance(value, float) and not math.isfinite(value):
        raise _TooLarge("numbers must be finite")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("contains NUL")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    raise ValueError(f"not a literal: {value!r}")
