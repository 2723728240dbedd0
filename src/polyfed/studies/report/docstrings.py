"""What a docstring says, in parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):\s*$")
_ARGUMENT = re.compile(r"^    (\w+)(?: \([^)]*\))?: (.*)$")


def text_of(doc: str) -> str:
    """The text before the sections."""
    shown: list[str] = []
    for line in inspect.cleandoc(doc).splitlines():
        if _SECTION.match(line):
            break
        shown.append(line)
    return "\n".join(shown).strip()


def reflowed(text: str) -> str:
    """The text with one line for each paragraph, so that a terminal can break it; indented lines (formulas) stay."""
    paragraphs = [paragraph.splitlines() for paragraph in text.replace("``", "`").split("\n\n")]
    return "\n\n".join(("\n" if any(line.startswith(" ") for line in lines) else " ").join(lines) for lines in paragraphs)


def arguments_of(doc: str) -> dict[str, str]:
    """What is said about each argument, on one line."""
    found: dict[str, list[str]] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(doc).splitlines():
        section = _SECTION.match(line)
        if section:
            inside = section.group(1) == "Args"
        elif inside and (match := _ARGUMENT.match(line)):
            name = match.group(1)
            found[name] = [match.group(2)]
        elif inside and name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def first_sentence(doc: str) -> str:
    """The first paragraph on one line, without the full stop."""
    return " ".join(text_of(doc).split("\n\n")[0].split()).rstrip(".")


def options_of(signature: inspect.Signature, doc: str, given_by_run: Iterable[str]) -> list[dict[str, object]]:
    """Each option with its default and what it means; those the run gives are left out."""
    said = arguments_of(doc)
    return [
        {
            "name": parameter.name,
            "default": None if parameter.default is inspect.Parameter.empty else parameter.default,
            "required": parameter.default is inspect.Parameter.empty,
            "meaning": said.get(parameter.name, ""),
        }
        for parameter in signature.parameters.values()
        if parameter.name not in set(given_by_run)
    ]
