"""Bytes in words, for tables and pictures."""

from __future__ import annotations


def byte_words(count: float) -> str:
    """Bytes in the largest unit that keeps the number above 1, with three digits (1 MB is a million bytes).

    >>> byte_words(3_501_200)
    '3.50 MB'
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{count:.0f} B"
