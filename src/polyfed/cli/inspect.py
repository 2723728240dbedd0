"""``polyfed inspect``: what a run folder contains; nothing that it names is imported, and torch is not needed."""

from __future__ import annotations

from typing import Any

from polyfed.cli.options import Json
from polyfed.cli.output import console, print_json, print_table, table
from polyfed.cli.run import RunFolderPath
from polyfed.studies.report.words import byte_words

EXAMPLE = "Example: polyfed inspect runs/digits-mini-fedbn-seed0"


def inspect(path: RunFolderPath, as_json: Json = False) -> None:
    """Show what a run folder contains, and what code it names, without running any of it."""
    from polyfed.runs.folder.inspection import inspected

    found = inspected(path)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    about = table(("what", "found"))
    for name in ("run", "written by", "method", "data", "given in Python", "checkpoint", "metrics"):
        about.add_row(name, plain(found[name.replace(" ", "_").lower()]))
    for sentence in found["code"] or ["none"]:
        about.add_row("code it names", plain(sentence))
    for sentence in found["problems"]:
        about.add_row("problem", plain(sentence))
    print_table("run folder", about)
    settings = table(("setting", "value"))
    for name, value in found["settings"].items():
        settings.add_row(plain(name), plain(value))
    console().print()
    print_table("settings", settings)
    files = table(("file", "size"), ("size",))
    for name, size in found["files"].items():
        files.add_row(plain(name), byte_words(size))
    console().print()
    print_table("files", files)


def plain(value: object) -> str:
    """Text of somebody else as it can be shown: neither markup nor what a terminal would obey."""
    from rich.markup import escape

    return escape("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value)))
