"""Read user-supplied images from a table that lists them: ``manifest(root="scans.csv", size=96)``, or ``polyfed run scans.csv``."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.data.declaration import DataOption
from polyfed.data.own.label_column import read_labels
from polyfed.data.own.own_images import SPLIT_WORDS, OwnImage, OwnImages, registered_own
from polyfed.data.own.table_columns import choose_group, group_option, unused_columns
from polyfed.data.store.archives import FolderTree
from polyfed.data.store.domain_files import first_of
from polyfed.errors import DataError, nearest
from polyfed.settings import AUTO

COLUMNS = ("path", "domain", "label", "group", "split")
OPTIONAL = ("group", "split")
READER = 'manifest(root="TABLE"'
SUFFIXES = (".csv", ".tsv", ".parquet")
LAYOUT = "table of path, domain, label"
Line = Mapping[str, str]


def find(
    table: Path,
    images: str = "",
    task: str = AUTO,
    path: str = "path",
    domain: str = "domain",
    label: str = "label",
    split: str = "split",
    group: str = AUTO,
) -> OwnImages:
    """Return the images that a table lists, not decoded yet."""
    written = _read_table(table)
    heads = tuple(written[0])
    column_of = {"path": path, "domain": domain, "label": label, "split": split}
    column_of = {what: column.strip().lower() for what, column in column_of.items()}
    values = {head: lambda head=head: [line.get(head, "") for line in written] for head in heads}
    column_of["group"] = choose_group(str(table), group.strip().lower(), values, "group", column_of.values(), READER)
    _require_columns(table, heads, column_of)
    lines = [{what: line.get(column, "") for what, column in column_of.items()} for line in written]
    _require_filled(table, lines)
    folder = Path(images).expanduser() if images else table.parent
    labels = read_labels([line["label"] for line in lines], task, str(table))
    targets = labels.targets or [()] * len(lines)
    listed = [
        OwnImage(line["path"], line["domain"], stratum, line["group"], _split(table, number, line["split"]), target)
        for number, (line, stratum, target) in enumerate(zip(lines, labels.strata, targets, strict=True), 2)
    ]
    _require_valid(table, folder, listed)
    return OwnImages(
        root=table,
        name=table.stem,
        tree=FolderTree(folder),
        layout=LAYOUT + "".join(f", {column}" for column in OPTIONAL if any(line[column] for line in lines)),
        images=sorted(listed, key=lambda image: image.name),
        classes=labels.names if labels.task.class_labels else tuple(dict.fromkeys(labels.strata)),
        reader=READER,
        notes=unused_columns(str(table), heads, column_of.values()),
        task=labels.task,
        outputs=labels.names,
    )


def _read_table(table: Path) -> list[Line]:
    """Return the lines of a table as stripped text by column, in lower case."""
    read = _parquet if table.suffix.lower() == ".parquet" else _csv
    lines = read(table)
    if not lines:
        raise DataError(f"{table} lists no images.")
    return lines


def _require_columns(table: Path, heads: Sequence[str], column_of: Mapping[str, str]) -> None:
    """Reject a table without a required column, or without one that the user named."""
    absent = [
        column for what, column in column_of.items() if column not in heads and (what not in OPTIONAL or column not in ("", what))
    ]
    if absent:
        options = ", ".join(f"{what}=..." for what in COLUMNS if column_of[what] in absent)
        raise DataError(
            f"{table} has the columns {', '.join(heads)}; it lacks {', '.join(absent)}. {nearest(absent[0], heads)} Add the column, or "
            f"specify another one with {READER}, {options})."
        )


def _require_filled(table: Path, lines: Sequence[Line]) -> None:
    for number, line in enumerate(lines, 2):
        # The label may be empty: an image can have none of several labels.
        blank = [column for column in ("path", "domain") if not line[column]]
        if blank:
            raise DataError(f"{table}, line {number}: no {', '.join(blank)}.")


def _csv(table: Path) -> list[Line]:
    try:
        text = table.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        separator = max(",;\t", key=header.count)
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        return [{_text(key).lower(): _text(value) for key, value in row.items() if key is not None} for row in rows]
    except UnicodeDecodeError as error:
        raise DataError(f"{table} is not UTF-8 text ({error.reason} at byte {error.start:,}). Save it as UTF-8.") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"Cannot read {table} as a table: {getattr(error, 'strerror', None) or error}.") from error


def _parquet(table: Path) -> list[Line]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{table} is a Parquet file, which needs pyarrow: pip install 'polyfed[parquet]'.") from error
    try:
        rows = parquet.read_table(table).to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"Cannot read {table} as a Parquet table: {error}.") from error
    return [{key.lower(): _text(value) for key, value in row.items()} for row in rows]


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _split(table: Path, number: int, word: str) -> str:
    if word and word.lower() not in SPLIT_WORDS:
        raise DataError(f"{table}, line {number}: split must be train, validation or test, got {word!r}.")
    return SPLIT_WORDS.get(word.lower(), "")


def _require_valid(table: Path, folder: Path, images: Sequence[OwnImage]) -> None:
    missing = [image.name for image in images if not (folder / image.name).is_file()]
    if missing and all(Path(name).is_absolute() for name in missing):
        raise DataError(f"{table} lists {len(missing)} files that do not exist: {first_of(missing)}.")
    if missing:
        raise DataError(
            f"{table} lists {len(missing)} files that are not in {folder}: {first_of(missing)}. Paths are relative to the table's folder, "
            'or to the folder that you pass: manifest(root="TABLE", images="FOLDER").'
        )
    repeated = [name for name, count in Counter(image.name for image in images).items() if count > 1]
    if repeated:
        raise DataError(f"{table} lists {len(repeated)} files more than once: {first_of(repeated)}.")
    without = [image.name for image in images if not image.split]
    if 0 < len(without) < len(images):
        raise DataError(f"{table} has a split for only some images; {len(without)} have none: {first_of(without)}.")
    splits: dict[tuple[str, str], dict[str, None]] = {}
    for image in images:
        if image.group:
            splits.setdefault((image.domain, image.group), {})[image.split] = None
    torn = [f"{group} of {domain} in {' and '.join(found)}" for (domain, group), found in splits.items() if len(found) > 1]
    if torn:
        raise DataError(
            f"{table} splits {len(torn)} groups across train, validation and test: {first_of(torn)}. "
            "Put all images of a group into the same split."
        )


manifest = registered_own(
    "manifest",
    """Images listed in a CSV, TSV or Parquet table, optionally with groups that are never split.

    The columns ``path``, ``domain`` and ``label`` are required; options specify other names. ``group`` specifies what an image
    shows, such as a patient: all images of a group of a domain are in the same split. A table without it is rejected if another
    column (``patient_id``, ``case``, ``slide``, ...) looks like groups, until the option ``group`` names a column or is empty.
    ``split`` (train, validation, test) assigns an image to a split; without it, each domain is split by class. Parquet requires the
    extra ``polyfed[parquet]``.

    Labels are usually classes. ``cat|dog`` are two labels of one image, which makes the task multi-label. Numbers of which at
    least one has a fraction make it regression. ``task`` (on the command line ``--task``) overrides this.
    """,
    root="The table.",
    find=find,
    before=[DataOption("images", "", "Folder that the paths are relative to. By default the folder of the table.")],
    after=[
        DataOption("task", AUTO, "What the labels are for: classification, multilabel, regression, or auto."),
        DataOption("path", "path", "Column of image files."),
        DataOption("domain", "domain", "Column of domains."),
        DataOption("label", "label", "Column of labels."),
        DataOption("split", "split", "Column of splits."),
        group_option,
    ],
)
