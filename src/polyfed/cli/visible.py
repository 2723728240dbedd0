"""Text of others as a terminal may show it."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with control characters, which a terminal would obey, written as escapes; also what cannot be encoded."""
    return "".join(char if char.isprintable() or char in "\n\t " else char.encode("unicode_escape").decode() for char in text)
