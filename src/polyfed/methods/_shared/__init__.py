"""Code shared by several methods. No module here registers a method."""

from __future__ import annotations

from collections.abc import Collection

from polyfed.errors import OptionError, nearest


def require_choice(method: str, option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise OptionError(f"{method}: {option} cannot be {value!r}. {nearest(value, known)}")
