"""``polyfed inspect``: contents of a run folder, without importing torch or any code of the run."""

from __future__ import annotations

from polyfed.cli.options import command, shared
from polyfed.cli.output import console, print_json
from polyfed.cli.tables import print_table
from polyfed.studies.report.words import byte_words


@command("inspect", "polyfed inspect runs/digits-mini-fedbn-seed0")
@shared("run", "json")
def inspect(path: str, as_json: bool) -> None:
    """Show what a run folder contains and which code it refers to, without running that code."""
    from polyfed.runs.folder.inspection import inspected

    found = inspected(path)
    if as_json:
        print_json(found)
        return
    names = ("run", "written by", "method", "data", "given in Python", "checkpoint", "metrics")
    rows = [(name, found[name.replace(" ", "_").lower()]) for name in names]
    rows += [("code", text) for text in found["code"] or ["none"]] + [("problem", text) for text in found["problems"]]
    print_table("run folder", ("name", "value"), [(name, _escape(value)) for name, value in rows])
    console().print()
    print_table("settings", ("setting", "value"), [(_escape(name), _escape(value)) for name, value in found["settings"].items()])
    console().print()
    files = [(_escape(name), byte_words(size)) for name, size in found["files"].items()]
    print_table("files", ("file", "size"), files, numbers=("size",))


def _escape(value: object) -> str:
    """Escape control characters and line breaks in text from an untrusted file."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))
