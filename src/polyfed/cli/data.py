"""``polyfed data``: downloads, checks, archives and cached copies of data sets."""

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
from polyfed.cli.options import argument, example_text, flag, shared
from polyfed.cli.output import console, print_json, status, visible
from polyfed.cli.tables import emit, print_table
from polyfed.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from polyfed.data.check import CheckResult
    from polyfed.data.store.download import RemoteFile


@click.group("data", cls=Group)
def data() -> None:
    """Download, check and pack data sets; list and clear cached copies."""


@data.command("ls", epilog=example_text("polyfed data ls"))
@shared("json")
def ls(as_json: bool) -> None:
    """List file-based data sets, how to obtain them, and their terms of use."""
    from polyfed.data.registry import data_sets

    found = [declared for name in data_sets.names() if (declared := data_sets.find(name).extra.get("declaration")) is not None]
    rows = [
        {"name": each.name.replace("_", "-"), "get": _format_files(each.files), "page": each.page, "terms": each.terms}
        for each in found
    ]
    emit(
        rows,
        {"data set": "name", "polyfed data get": "get", "page": "page", "terms": "terms"},
        {"data_sets": rows} if as_json else None,
        "file-based data sets",
        optional=[["page"], ["terms"]],
    )


def _format_files(files: Sequence[RemoteFile]) -> str:
    if not files:
        return "manual download"
    size = sum(file.max_bytes for file in files) / 10**6
    return f"{len(files)} file{'s' * (len(files) != 1)}, at most {size:,.0f} MB"


@data.command("get", epilog=example_text("polyfed data get cifar10 --root ~/data"))
@argument("name", "NAME", "Data set name (polyfed data ls).", shell_complete=complete("data"))
@click.option("--root", metavar="DIR", type=Path, required=True, help="Folder for the files.")
@shared("json")
def get(name: str, root: Path, as_json: bool) -> None:
    """Download a data set and verify its checksums.

    Resumes partial downloads. Prints the download page of data sets that need a manual download.
    """
    from polyfed.data.declaration import Declaration
    from polyfed.data.registry import data_sets
    from polyfed.data.store.download import get as downloaded

    declared = data_sets.find(name).extra.get("declaration")
    if not isinstance(declared, Declaration):
        raise DataError(f"{name} has no files to download.")
    source = f"{declared.title}: {declared.page}. Terms: {declared.terms}. Expected files: {'; '.join(declared.layouts)}."
    if not declared.files:
        raise DataError(f"{declared.title} must be downloaded manually. {source}")
    with _download_bar(as_json) as progress:
        fetched = downloaded(declared.files, root.expanduser(), progress)
    if as_json:
        terms = {"terms": declared.terms, "page": declared.page}
        print_json({"name": declared.name, "root": str(root), "downloaded": fetched, **terms})
    else:
        print(f"Downloaded {len(fetched)} of {len(declared.files)} files to {root}; the others already exist. {source}")


@contextmanager
def _download_bar(quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar for each downloaded file on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            bar.update(tasks[name], completed=done, total=total)

        yield show


@data.command("pack", epilog=example_text("polyfed data pack ~/data/PACS --size 96 --out PACS.tar"))
@argument("source", "SOURCE", "Folder or archive of images.", type=Path)
@click.option("--size", type=int, required=True, help="Side length of the images in the archive, in pixels.")
@click.option("--out", metavar="FILE", type=Path, required=True, help="Archive to write (.tar).")
@shared("json")
def pack(source: Path, size: int, out: Path, as_json: bool) -> None:
    """Resize images and pack them into one tar file, which polyfed reads like the original folder. File names do not change."""
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
@argument("name", "DATA", "Folder or table of images, or data set name (polyfed ls data).", shell_complete=complete("data"))
@click.option("--root", metavar="DIR", help="Folder with the data set files.")
@click.option("--sheet", metavar="FILE", type=Path, help="Contact sheet to write (.png).")
@shared("json")
def check(name: str, root: str | None, sheet: Path | None, as_json: bool) -> None:
    """Decode every image and report counts, sizes, unreadable files, mismatched masks and duplicates.

    Known data sets are checked against their reference.
    """
    with status("Reading every image", as_json):
        from polyfed.data.check import check as checked

        found = checked(name, root, sheet)
    (_print_json if as_json else _print_tables)(found, sheet)
    if not found.ok:
        raise click.exceptions.Exit(BAD_INPUT)


@data.command("cache", epilog=example_text("polyfed data cache", "polyfed data cache ./my_images --clear"))
@argument("only", "[DATA]", "Only copies of this folder, table or data set name.", required=False)
@flag("--clear", help="Remove the listed copies. The next run decodes the images again.")
@shared("json")
def cache(only: str | None, clear: bool, as_json: bool) -> None:
    """List the decoded copies of images that polyfed keeps in its cache, or remove them."""
    from polyfed.data.store.cache import cache_folder
    from polyfed.data.store.copies import list_copies, remove_copies
    from polyfed.studies.report.words import format_bytes

    found = list_copies(only)
    if clear:
        remove_copies(found)
    total, folder = sum(copy.bytes for copy in found), str(cache_folder())
    rows = [
        {
            "data": copy.data,
            "domain": copy.domain,
            "path": copy.root,
            "bytes": copy.bytes,
            "last_use": f"{copy.last_use:%Y-%m-%d %H:%M}",
            "copy": str(copy.files[0]),
        }
        for copy in found
    ]
    tree = {"folder": folder, "copies": rows, "bytes": total, "cleared": clear}
    columns: dict[str, Any] = {"data set": "data", "domain": "domain", "path": "path"}
    columns |= {"size": lambda row: format_bytes(row["bytes"]), "last use (UTC)": "last_use", "copy": "copy"}
    if found or as_json:
        title = "removed copies of images" if clear else "copies of images"
        emit(rows, columns, tree if as_json else None, title, numbers=("size",), optional=[["copy"]])
    if not as_json:
        kept = f"{len(found)} cop{'y' if len(found) == 1 else 'ies'}, {format_bytes(total)}"
        print(f"{'Removed' if clear else 'Found'} {kept}, {'from' if clear else 'in'} {visible(folder)}.")


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
        classes = [(label, *(f"{by[index]:,}" for by in found.by_class.values())) for index, label in enumerate(found.classes)]
        print_table("images per class", ("class", *domains), classes, numbers=domains)
        print(f"Image modes: {', '.join(f'{kind} {count:,}' for kind, count in found.modes.items())}.")
    for sentence in (*found.notes, *found.problems, *([f"Contact sheet: {sheet}."] if sheet else []), found.summary()):
        print(visible(sentence))


def _print_counts(name: str, counts: Mapping[str, Mapping[str, Any]], **details: Mapping[str, str]) -> None:
    """Print the number of images per domain and split, with additional columns for each domain."""
    splits = list(dict.fromkeys(split for by in counts.values() for split in by))
    rows = [
        (domain, *(texts.get(domain, "") for texts in details.values()), *(f"{sum(by.get(split, ())):,}" for split in splits))
        for domain, by in counts.items()
    ]
    print_table(f"images of {name}", ("domain", *details, *splits), rows, numbers=splits)
