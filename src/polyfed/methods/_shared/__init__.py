"""What several methods need. Nothing here is a method, and nothing outside ``methods`` imports it."""

from __future__ import annotations

from collections.abc import Collection

from polyfed.errors import OptionError, nearest


def require_choice(method: str, option: str, value: str, known: Collection[str]) -> None:
    """Refuse a value of an option that is not among the choices."""
    if value not in known:
        raise OptionError(f"{method}: {option} cannot be {value!r}. {nearest(value, known)}")
