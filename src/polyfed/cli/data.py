"""``polyfed data``: look after data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Json
from polyfed.cli.output import busy, print_json, print_table, table

EXAMPLE = "Example: polyfed data check digits-five --root ~/data/digits-five"

data_app = typer.Typer(help="Look after the files of data sets.", no_args_is_help=True)


@data_app.command("check", epilog=EXAMPLE)
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set (polyfed ls data).")],
    root: Annotated[str, typer.Option("--root", metavar="DIR", help="Folder that holds its files.")],
    as_json: Json = False,
) -> None:
    """Compare the files of a data set with what is known of it; every image is decoded."""
    with busy("Reading every image", as_json):
        from polyfed.data.check import check as compared

        found = compared(name, root)
    if as_json:
        described = {"name": found.name, "root": found.root, "ok": found.ok, "layouts": found.layouts, "problems": found.problems}
        print_json(
            described | {"counts": {domain: {split: sum(n) for split, n in by.items()} for domain, by in found.counts.items()}}
        )
    else:
        splits = list(dict.fromkeys(split for by in found.counts.values() for split in by))
        shown = table(("domain", "layout", *splits), splits)
        for domain, by in found.counts.items():
            shown.add_row(domain, found.layouts.get(domain, ""), *(f"{sum(by.get(split, ())):,}" for split in splits))
        print_table(f"images of {found.name}", shown)
        for problem in found.problems:
            print(problem)
        print(found.summary())
    if not found.ok:
        raise typer.Exit(BAD_INPUT)
