"""``polyfed data``: look after data sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Json
from polyfed.cli.output import busy, print_json, print_table, table, visible
from polyfed.errors import DataError, SettingError

EXAMPLE = "Examples: polyfed data check ./my_images --sheet sheet.png; polyfed data check digits-five --root ~/data/digits-five"

data_app = typer.Typer(help="Look after the files of data sets.", no_args_is_help=True)


@data_app.command("check", epilog=EXAMPLE)
def check(
    name: Annotated[str, typer.Argument(metavar="DATA", help="A folder or table of images, or a data set (polyfed ls data).")],
    root: Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder that holds a data set's files.")] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", metavar="FILE", help="Contact sheet of own images, as .png.")] = None,
    as_json: Json = False,
) -> None:
    """Look through images: counts, sizes, damage, images that are there twice. Every image is decoded.

    The files of a data set are compared with what is known of it.
    """
    from polyfed.data.own_data import is_own_data

    if is_own_data(name) and root is None:
        _check_own(name, sheet, as_json)
    else:
        _check_known(name, root, sheet, as_json)


def _check_own(path: str, sheet: Path | None, as_json: bool) -> None:
    with busy("Reading every image", as_json):
        from polyfed.data.check_own import check_own

        found = check_own(path, sheet)
    if as_json:
        print_json({**dataclasses.asdict(found), "ok": found.ok, "sheet": None if sheet is None else str(sheet)})
    else:
        splits = list(dict.fromkeys(split for by in found.counts.values() for split in by))
        shown = table(("domain", *splits, "pixels"), splits)
        for domain, by in found.counts.items():
            shown.add_row(domain, *(f"{sum(by[split]):,}" for split in splits), found.sizes.get(domain, ""))
        print_table(f"images of {found.name}", shown)
        classes = table(("class", *found.counts), list(found.counts))
        for place, label in enumerate(found.classes):
            classes.add_row(label, *(f"{by['all'][place]:,}" for by in found.counts.values()))
        print_table("images by class", classes)
        print(f"Kinds of files: {', '.join(f'{kind} {count:,}' for kind, count in found.modes.items())}.")
        for sentence in (*found.notes, *found.problems, *([f"Contact sheet: {sheet}."] if sheet else []), found.summary()):
            print(visible(sentence))
    if not found.ok:
        raise typer.Exit(BAD_INPUT)


def _check_known(name: str, root: str | None, sheet: Path | None, as_json: bool) -> None:
    if root is None:
        raise DataError(
            f"{name} is no folder or table of images. If it is a data set (polyfed ls data), give the folder that holds its files: --root DIR."
        )
    if sheet is not None:
        raise SettingError("--sheet is for a folder or table of own images: polyfed data check ./my_images --sheet FILE.")
    with busy("Reading every image", as_json):
        from polyfed.data.check import check as compared

        found = compared(name, root)
    if as_json:
        described = {"name": found.name, "root": found.root, "ok": found.ok, "layouts": found.layouts, "problems": found.problems}
        counts = {domain: {split: sum(n) for split, n in by.items()} for domain, by in found.counts.items()}
        print_json(described | {"notes": found.notes, "counts": counts})
    else:
        splits = list(dict.fromkeys(split for by in found.counts.values() for split in by))
        shown = table(("domain", "layout", *splits), splits)
        for domain, by in found.counts.items():
            shown.add_row(domain, found.layouts.get(domain, ""), *(f"{sum(by.get(split, ())):,}" for split in splits))
        print_table(f"images of {found.name}", shown)
        for sentence in (*found.notes, *found.problems, found.summary()):
            print(visible(sentence))
    if not found.ok:
        raise typer.Exit(BAD_INPUT)
