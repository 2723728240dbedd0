"""``polyfed data``: look after data sets."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.help import Group
from polyfed.cli.options import argument, example_text, shared
from polyfed.cli.output import console, print_json, status, visible
from polyfed.cli.tables import emit, print_table
from polyfed.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from polyfed.data.check import CheckResult
    from polyfed.data.store.download import RemoteFile


@click.group("data", cls=Group)
def data() -> None:
    """Look after the files of data sets."""


@data.command("ls", epilog=example_text("polyfed data ls"))
@shared("json")
def ls(as_json: bool) -> None:
    """List data sets that are read from files: how they are had, and on what terms."""
    from polyfed.data.registry import data_sets

    found = [declared for name in data_sets.names() if (declared := data_sets.find(name).extra.get("declaration")) is not None]
    rows = [
        {"name": one.name.replace("_", "-"), "get": _get_words(one.files), "page": one.page, "terms": one.terms} for one in found
    ]
    emit(
        rows,
        {"data set": "name", "polyfed data get": "get", "page": "page", "terms": "terms"},
        {"data_sets": rows} if as_json else None,
        "data sets that are read from files",
        later=[["page"], ["terms"]],
    )


def _get_words(files: Sequence[RemoteFile]) -> str:
    """Return how many files can be downloaded, and how large they are at most."""
    if not files:
        return "by hand"
    most = sum(file.max_bytes for file in files)
    return f"{len(files)} file{'s' if len(files) != 1 else ''}, at most {most / 10**6:,.0f} MB"


@data.command("get", epilog=example_text("polyfed data get cifar10 --root ~/data"))
@argument("name", "NAME", "A data set (polyfed data ls).", shell_complete=complete("data"))
@click.option("--root", metavar="DIR", type=Path, required=True, help="Folder for its files.")
@shared("json")
def get(name: str, root: Path, as_json: bool) -> None:
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
    with _download_bar(as_json) as progress:
        fetched = downloaded(declared.files, root.expanduser(), progress)
    if as_json:
        about = {"terms": declared.terms, "page": declared.page}
        print_json({"name": declared.name, "root": str(root), "downloaded": fetched, **about})
    else:
        print(f"{len(fetched)} of {len(declared.files)} files downloaded to {root}, the others were there. {by_hand}")


@contextmanager
def _download_bar(quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for the file that is downloaded, if there is a terminal."""
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


@data.command("pack", epilog=example_text("polyfed data pack ~/data/PACS --size 96 --out PACS.tar"))
@argument("source", "SOURCE", "A folder or archive of images.", type=Path)
@click.option("--size", type=int, required=True, help="Side of the images in the archive.")
@click.option("--out", metavar="FILE", type=Path, required=True, help="The new .tar file.")
@shared("json")
def pack(source: Path, size: int, out: Path, as_json: bool) -> None:
    """Pack images into one tar of small ones under the same names; it is read wherever an archive of the same folders is."""
    with status("Packing", as_json):
        from polyfed.data.formats.pack import pack as packed

        made = packed(source.expanduser(), size, out)
    if as_json:
        print_json({"file": str(out), **dataclasses.asdict(made)})
    else:
        print(f"{out}: {made.images:,} images, {made.others:,} other files, {made.bytes:,} bytes, sha256 {made.sha256}.")


@data.command(
    "check",
    epilog=example_text(
        "polyfed data check ./my_images --sheet sheet.png", "polyfed data check digits-five --root ~/data/digits-five"
    ),
)
@argument("name", "DATA", "A folder or table of images, or a data set (polyfed ls data).", shell_complete=complete("data"))
@click.option("--root", metavar="DIR", help="Folder that holds a data set's files.")
@click.option("--sheet", metavar="FILE", type=Path, help="Contact sheet of own images, as .png.")
@shared("json")
def check(name: str, root: str | None, sheet: Path | None, as_json: bool) -> None:
    """Look through images: counts, sizes, damage, masks that do not fit, images that are there twice. Every image is decoded.

    The files of a data set are compared with what is known of it.
    """
    with status("Reading every image", as_json):
        from polyfed.data.check import check as checked

        found = checked(name, root, sheet)
    (_print_json if as_json else _print_tables)(found, sheet)
    if not found.ok:
        raise click.exceptions.Exit(BAD_INPUT)


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
    if found.layouts is not None:
        _print_counts(found.name, found.counts, layout=found.layouts)
    else:
        _print_counts(found.name, found.counts, pixels=found.sizes)
        domains = list(found.counts)
        classes = [(label, *(f"{by[at]:,}" for by in found.by_class.values())) for at, label in enumerate(found.classes)]
        print_table("images by class", ("class", *domains), classes, numbers=domains)
        print(f"Kinds of files: {', '.join(f'{kind} {count:,}' for kind, count in found.modes.items())}.")
    _print_sentences(*found.notes, *found.problems, *([f"Contact sheet: {sheet}."] if sheet else []), found.summary())


def _print_counts(name: str, counts: Mapping[str, Mapping[str, Any]], **about: Mapping[str, str]) -> None:
    """Print the images of each domain and split, with something about each domain."""
    splits = list(dict.fromkeys(split for by in counts.values() for split in by))
    rows = [
        (domain, *(words.get(domain, "") for words in about.values()), *(f"{sum(by.get(split, ())):,}" for split in splits))
        for domain, by in counts.items()
    ]
    print_table(f"images of {name}", ("domain", *about, *splits), rows, numbers=splits)


def _print_sentences(*sentences: str) -> None:
    for sentence in sentences:
        print(visible(sentence))
