"""``polyfed inspect``: what a run folder contains; nothing that it names is imported, and torch is not needed."""

from __future__ import annotations

from polyfed.cli.options import command, shared
from polyfed.cli.output import console, print_json
from polyfed.cli.tables import print_table
from polyfed.studies.report.words import format_bytes


@command("inspect", "polyfed inspect runs/digits-mini-fedbn-seed0")
@shared("run", "json")
def inspect(path: str, as_json: bool) -> None:
    """Show what a run folder contains, and what code it names, without running any of it."""
    from polyfed.runs.folder.inspection import inspect_run

    found = inspect_run(path)
    if as_json:
        print_json(found)
        return
    names = ("run", "written by", "method", "data", "given in Python", "checkpoint", "metrics")
    about = [(name, found[name.replace(" ", "_").lower()]) for name in names]
    about += [("code it names", sentence) for sentence in found["code"] or ["none"]]
    about += [("problem", sentence) for sentence in found["problems"]]
    print_table("run folder", ("what", "found"), [(name, _plain(value)) for name, value in about])
    console().print()
    print_table("settings", ("setting", "value"), [(_plain(name), _plain(value)) for name, value in found["settings"].items()])
    console().print()
    files = [(_plain(name), format_bytes(size)) for name, size in found["files"].items()]
    print_table("files", ("file", "size"), files, numbers=("size",))


def _plain(value: object) -> str:
    """Return text from a foreign file on one line, without what a terminal would obey."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))
