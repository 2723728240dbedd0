"""The text form: ``fedbn + agc(clip=1.28)``. Parsed, never evaluated.

A text is a sum of calls; a call is a name with literal options. The same reader serves methods,
models, data sets, partitions and schedules.
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
    """A name with its options, as written."""

    name: str
    positional: tuple[Option, ...] = ()
    named: Mapping[str, Option] = field(default_factory=dict)
    spelled: str = field(default="", compare=False)
    """The name as the user wrote it, for messages."""


def read_sum(text: str) -> list[Call]:
    """Read ``a + b(x=1)`` into its calls, in the order written.

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
    """Read a single call. Hyphens in its name are allowed: ``digits-mini`` is ``digits_mini``."""
    read = _underscored(text)
    return _call(_parse(read), read, text)


def _signs(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the place of each sign, the sign, and whether it is outside of brackets and quotes."""
    depth, quote = 0, ""
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += 0 if quote else (sign in "([") - (sign in ")]")
        yield place, sign, depth == 0 and not quote


def outside_brackets(text: str) -> str:
    """Return what of a text is in no brackets and no quotes.

    >>> outside_brackets("a(at=(1, 2), b=3), c")
    'a, c'
    """
    return "".join(sign for _, sign, outside in _signs(text) if outside and sign not in "()[]'\"")


def apart(text: str, separator: str = ",") -> list[str]:
    """Return the pieces between commas that are in no brackets and no quotes.

    >>> apart("constant, steps(at=(0.5, 0.75)), cosine")
    ['constant', 'steps(at=(0.5, 0.75))', 'cosine']
    """
    pieces = [""]
    for _, sign, outside in _signs(text):
        if outside and sign == separator:
            pieces.append("")
        else:
            pieces[-1] += sign
    return [piece.strip() for piece in pieces if piece.strip()]


def literal_or_text(text: str) -> Any:
    """Return the value that a literal stands for; anything else is text.

    >>> literal_or_text("0.5"), literal_or_text("cosine")
    (0.5, 'cosine')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _underscored(text: str) -> str:
    """The text with underscores for the hyphens in names; inside brackets and quotes nothing changes.

    >>> _underscored("fed-avg + group-norm(groups=-2)")
    'fed_avg + group_norm(groups=-2)'
    """
    return "".join(
        "_" if outside and sign == "-" and re.match(r"\w-\w", text[max(place - 1, 0) : place + 2]) else sign
        for place, sign, outside in _signs(text)
    )


def write_call(name: str, options: Mapping[str, Option]) -> str:
    """Write a call so that reading it gives the same value back.

    >>> write_call("agc", {"clip": 1.28})
    'agc(clip=1.28)'
    """
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={write_option(value)}' for key, value in options.items())})"


def write_option(value: Option) -> str:
    """Write one literal."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        inner = ", ".join(write_option(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def _parse(text: str) -> ast.expr:
    if not text.strip():
        raise TextError("The text is empty. Write a name, for example: fedbn + agc(clip=1.28)")
    if len(text) > LONGEST_TEXT:
        raise TextError(f"The text has {len(text)} characters; at most {LONGEST_TEXT} are read.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TextError(
            f"Cannot read {_shortened(text)!r}. Write names joined by +, options in brackets: fedbn + agc(clip=1.28)"
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
            raise TextError(f"Cannot read {text!r}: {keyword.arg} is written twice.")
        named[keyword.arg] = _literal(keyword.value, text)
    spelled = ast.get_source_segment(written.strip(), node.func) or node.func.id
    return Call(node.func.id, tuple(_literal(argument, text) for argument in node.args), named, spelled)


def _literal(node: ast.expr, text: str) -> Option:
    try:
        return _frozen(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise TextError(
            f"Cannot use {_source(node, text)!r} in {_shortened(text)!r} as an option: numbers, true/false, text in quotes and lists "
            f"are allowed{f' ({error})' if isinstance(error, _TooLarge) else ''}."
        ) from error


class _TooLarge(ValueError):
    """A number that no option takes."""


def _source(node: ast.expr, text: str) -> str:
    return _shortened(ast.get_source_segment(text.strip(), node) or text)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _frozen(value: object) -> Option:
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise _TooLarge("whole numbers up to 2^63")
    if isinstance(value, float) and not math.isfinite(value):
        raise _TooLarge("numbers that are finite")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a text with NUL")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    raise ValueError(f"not a literal option: {value!r}")
