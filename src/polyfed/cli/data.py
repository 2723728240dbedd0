"""``polyfed data``: look after data sets."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.completion import complete
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Json
from polyfed.cli.output import busy, console, print_json, print_table, table
from polyfed.cli.visible import visible
from polyfed.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from polyfed.data.check import CheckResult
    from polyfed.data.store.download import RemoteFile

EXAMPLE = (
    "Examples:\n\npolyfed data check ./my_images --sheet sheet.png\n\npolyfed data check digits-five --root ~/data/digits-five"
)

data_app = typer.Typer(help="Look after the files of data sets.", no_args_is_help=True)


@data_app.command("ls", epilog="Example: polyfed data ls")
def ls(as_json: Json = False) -> None:
    """List data sets that are read from files: how they are had, and on what terms."""
    from polyfed.data.registry import data_sets

    found = [declared for name in data_sets.names() if (declared := data_sets.find(name).extra.get("declaration")) is not None]
    rows = [
        {
            "name": declared.name.replace("_", "-"),
            "get": get_words(declared.files),
            "page": declared.page,
            "terms": declared.terms,
        }
        for declared in found
    ]
    if as_json:
        print_json({"data_sets": rows})
        return
    shown = table(("data set", "polyfed data get", "page", "terms"), later=[["page"], ["terms"]])
    for row in rows:
        shown.add_row(*row.values())
    print_table("data sets that are read from files", shown)


def get_words(files: Sequence[RemoteFile]) -> str:
    """How many files can be downloaded, and how large they are at most."""
    if not files:
        return "by hand"
    most = sum(file.most_bytes for file in files)
    return f"{len(files)} file{'s' if len(files) != 1 else ''}, at most {most / 10**6:,.0f} MB"


@data_app.command("get", epilog="Example: polyfed data get cifar10 --root ~/data")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set (polyfed data ls).", autocompletion=complete("data"))],
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="Folder for its files.")],
    as_json: Json = False,
) -> None:
    """Download the files of a data set, with checksums; what came before goes on. Some must be had by hand: then the page is named."""
    from polyfed.data.declaration import Declaration
    from polyfed.data.registry import data_sets
    from polyfed.data.store.download import get as downloaded

    declared = data_sets.find(name).extra.get("declaration")
    if not isinstance(declared, Declaration):
        raise DataError(f"{name} is not read from files of a known data set, so there is nothing to get.")
    by_hand = f"{declared.title}: {declared.page}. Terms: {declared.terms}. It is read from: {'; '.join(declared.layouts)}."
    if not declared.files:
        raise DataError(f"{declared.title} must be had by hand. {by_hand}")
    with download_bar(as_json) as progress:
        fetched = downloaded(declared.files, root.expanduser(), progress)
    if as_json:
        print_json(
            {"name": declared.name, "root": str(root), "downloaded": fetched, "terms": declared.terms, "page": declared.page}
        )
    else:
        print(f"{len(fetched)} of {len(declared.files)} files downloaded to {root}, the others were there. {by_hand}")


@contextmanager
def download_bar(quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for the file that comes in, where there is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda name, there, whole: None
        return
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, there: int, whole: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            bar.update(tasks[name], completed=there, total=whole)

        yield show


@data_app.command("pack", epilog="Example: polyfed data pack ~/data/PACS --size 96 --out PACS.tar")
def pack(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder or archive of images.")],
    size: Annotated[int, typer.Option("--size", help="Side of the images in the archive.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The new .tar file.")],
    as_json: Json = False,
) -> None:
    """Pack images into one tar of small ones under the same names; it is read wherever an archive of the same folders is."""
    with busy("Packing", as_json):
        from polyfed.data.formats.pack import pack as packed

        made = packed(source.expanduser(), size, out)
    if as_json:
        print_json({"file": str(out), **dataclasses.asdict(made)})
    else:
        print(f"{out}: {made.images:,} images, {made.others:,} other files, {made.bytes:,} bytes, sha256 {made.sha256}.")


@data_app.command("check", epilog=EXAMPLE)
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A folder or table of images, or a data set (polyfed ls data).", autocompletion=complete("data")
        ),
    ],
    root: Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder that holds a data set's files.")] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", metavar="FILE", help="Contact sheet of own images, as .png.")] = None,
    as_json: Json = False,
) -> None:
    """Look through images: counts, sizes, damage, masks that do not fit, images that are there twice. Every image is decoded.

    The files of a data set are compared with what is known of it.
    """
    with busy("Reading every image", as_json):
        from polyfed.data.check import check as checked

        found = checked(name, root, sheet)
    (_print_json if as_json else _print_tables)(found, sheet)
    if not found.ok:
        raise typer.Exit(BAD_INPUT)


def _print_json(found: CheckResult, sheet: Path | None) -> None:
    described = dataclasses.asdict(found)
    layouts = described.pop("layouts")
    if layouts is None:
        print_json({**described, "ok": found.ok, "sheet": None if sheet is None else str(sheet)})
        return
    counts = {domain: {split: sum(n) for split, n in by.items()} for domain, by in found.counts.items()}
    shown = {"name": found.name, "root": found.root, "ok": found.ok, "layouts": layouts, "problems": found.problems}
    print_json(shown | {"notes": found.notes, "counts": counts})


def _print_tables(found: CheckResult, sheet: Path | None) -> None:
    splits = list(dict.fromkeys(split for by in found.counts.values() for split in by))
    layouts = found.layouts
    shown = table(("domain", *splits, "pixels") if layouts is None else ("domain", "layout", *splits), splits)
    for domain, by in found.counts.items():
        counts = [f"{sum(by.get(split, ())):,}" for split in splits]
        if layouts is None:
            shown.add_row(domain, *counts, found.sizes.get(domain, ""))
        else:
            shown.add_row(domain, layouts.get(domain, ""), *counts)
    print_table(f"images of {found.name}", shown)
    if layouts is None:
        classes = table(("class", *found.counts), list(found.counts))
        for place, label in enumerate(found.classes):
            classes.add_row(label, *(f"{by[place]:,}" for by in found.by_class.values()))
        print_table("images by class", classes)
        print(f"Kinds of files: {', '.join(f'{kind} {count:,}' for kind, count in found.modes.items())}.")
    for sentence in (*found.notes, *found.problems, *([f"Contact sheet: {sheet}."] if sheet else []), found.summary()):
        print(visible(sentence))
