"""Settings written as text: ``lr=0.1, schedule=cosine``, on the command line and behind a method."""

from __future__ import annotations

import ast
import functools
import types
import typing
from typing import Any

from polyfed.errors import SettingError, nearest
from polyfed.settings import Settings, setting_names


def read_change(text: str, where: str = "--set takes") -> tuple[str, Any]:
    """Read ``key=value``; the value is a literal, or text where the setting is text.

    >>> read_change("clients-per-round=3"), read_change("checkpoint_every=10"), read_change("unseen=street")
    (('clients_per_round', 3), ('checkpoint_every', '10'), ('unseen', ('street',)))

    Args:
        text: as written.
        where: how the error begins.
    """
    key, equals, written = text.partition("=")
    name = key.strip().replace("-", "_")
    if not equals:
        raise SettingError(f"{where} key=value, found {text!r}.")
    if name not in setting_names():
        raise SettingError(f"There is no setting {name!r}. {nearest(name, setting_names())}")
    try:
        value = ast.literal_eval(written.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = written
    kind = plain_type(name)
    if kind == list[str]:
        return name, (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
    if kind is str and value is not None and not isinstance(value, str):
        return name, written
    return name, value


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def plain_type(name: str) -> Any:
    """The type of a setting's values, as an option of the command line has it."""
    hint = _hints()[name]
    if typing.get_origin(hint) is tuple:
        return list[str]
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def apart(text: str, sign: str = ",") -> list[str]:
    """Pieces between commas that are in no brackets and no quotes.

    >>> apart("constant, steps(at=(0.5, 0.75)), cosine")
    ['constant', 'steps(at=(0.5, 0.75))', 'cosine']
    """
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "\"'":
            quote = "" if letter == quote else quote or letter
        depth += 0 if quote else (letter in "([") - (letter in ")]")
        if letter == sign and depth == 0 and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]
