"""Images of a copy that Hugging Face's ``datasets`` wrote: ``huggingface(root="pacs_copy")``, or ``polyfed run ./pacs_copy``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.data.declaration import DataOption
from polyfed.data.own.own_images import SPLIT_WORDS, OwnImage, OwnImages, registered_own
from polyfed.data.store.archives import FileIdentity, contents, identities
from polyfed.data.store.cache import cache_folder
from polyfed.errors import DataError, MissingExtra, nearest

LAYOUT = "Hugging Face copy"
MARKS = ("dataset_dict.json", "state.json")
"""Files of a folder that ``save_to_disk`` wrote."""


def holds_copy(root: str | Path) -> bool:
    """Whether a folder looks like such a copy."""
    folder = Path(root).expanduser()
    return folder.is_dir() and (any((folder / mark).is_file() for mark in MARKS) or bool(_parquet_files(folder)))


def _parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder, or of its folder data, as the hub has them."""
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def copied_in(root: Path, image: str = "image", label: str = "label", domain: str = "domain", group: str = "") -> OwnImages:
    """The images of a copy."""
    tree = _CopiedImages(root, image)
    by_split: dict[str, list[OwnImage]] = {}
    total = 0
    for split, rows in tree.splits.items():
        tree.require(label, rows.column_names)
        for name in (domain if domain != "domain" else "", group):
            if name:
                tree.require(name, rows.column_names)
        labels = _names(rows, label)
        domains = _names(rows, domain) if domain in rows.column_names else [root.resolve().name] * len(rows)
        groups = _names(rows, group) if group else [""] * len(rows)
        facts = enumerate(zip(domains, labels, groups, strict=True))
        by_split[split] = [OwnImage(f"{split}/{row}", *fact) for row, fact in facts if fact[1]]
        total += len(rows)
    parts = _parts_of([split for split, images in by_split.items() if images])
    listed = [replace(image, split=parts.get(split, "")) for split, images in by_split.items() for image in images]
    if not listed:
        raise DataError(f"{root} holds no images with a label in the column {label!r}.")
    unlabelled = total - len(listed)
    return OwnImages(
        root=root,
        name=root.resolve().name,
        tree=tree,
        layout=LAYOUT,
        images=sorted(listed, key=lambda each: each.name),
        classes=tuple(dict.fromkeys([*tree.class_names(label), *sorted({each.label for each in listed})])),
        reader='huggingface(root="FOLDER"',
        notes=(f"{root}: {unlabelled:,} of {total:,} images have no label and are left out.",) if unlabelled else (),
    )


def _parts_of(splits: Sequence[str]) -> dict[str, str]:
    """Which part each split of the copy is; none where polyfed shall split."""
    parts = {split: SPLIT_WORDS.get(split.lower(), "") for split in splits}
    if {"train", "test"} <= set(parts.values()):
        return parts
    if sorted(parts.values()) == ["train", "validation"]:
        return {split: "train" if part == "train" else "test" for split, part in parts.items()}
    return {}


def _names(rows: Any, column: str) -> list[str]:
    """The values of a column, those of a class by its name; empty where there is none, which the hub writes as -1."""
    feature = rows.features[column]
    if not hasattr(feature, "int2str"):
        return ["" if value is None else str(value) for value in rows[column]]
    return ["" if value is None or value < 0 else feature.int2str(value) for value in rows[column]]


class _CopiedImages:
    """The images of a copy as files: ``<split>/<row>``."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The rows of each split, with images as they lie in the copy."""
        datasets = _library()
        if not holds_copy(self.path):
            raise DataError(
                f"{self.path} holds no copy by Hugging Face's datasets: {contents(self.path)}. Expected a folder of save_to_disk, or Parquet "
                "files of the hub."
            )
        try:
            with _quiet(datasets):
                found = self._read(datasets)
        except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{self.path} cannot be read as a copy by Hugging Face's datasets: {error}.") from error
        splits = dict(found) if isinstance(found, dict) else {"all": found}
        for rows in splits.values():
            self.require(self.column, rows.column_names)
        return {name: rows.cast_column(self.column, datasets.Image(decode=False)) for name, rows in splits.items()}

    def _read(self, datasets: Any) -> Any:
        if any((self.path / mark).is_file() for mark in MARKS):
            return datasets.load_from_disk(str(self.path))
        files: dict[str, list[str]] = {}
        for file in _parquet_files(self.path):
            word = file.name.split("-")[0].split(".")[0].lower()
            files.setdefault(word if word in SPLIT_WORDS else "all", []).append(str(file))
        return datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache_folder() / "huggingface"))

    def class_names(self, label: str) -> list[str]:
        """All classes that the copy declares, in the order of their numbers; none where labels are plain values."""
        return next(
            (list(rows.features[label].names) for rows in self.splits.values() if hasattr(rows.features[label], "names")), []
        )

    def require(self, column: str, columns: Sequence[str]) -> None:
        """Refuse a column that the copy has not."""
        if column not in columns:
            raise DataError(
                f"{self.path} has no column {column!r}. {nearest(column, columns)} Name it: huggingface(image=..., label=..., domain=...)."
            )

    @cached_property
    def names(self) -> Sequence[str]:
        """All images."""
        return [f"{split}/{row}" for split, rows in self.splits.items() for row in range(len(rows))]

    def read(self, name: str) -> bytes:
        """The bytes of an image."""
        split, _, row = name.partition("/")
        found = self.splits[split][int(row)][self.column]
        if found is None or (found["bytes"] is None and not found["path"]):
            raise DataError(f"{self.path}, {name}: there is no image.")
        if found["bytes"] is not None:
            content: bytes = found["bytes"]
            return content
        try:
            return Path(found["path"]).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}, {name}: {found['path']} cannot be read: {error.strerror or error}.") from error

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        """What tells the copy from another: all its files."""
        return identities(sorted(path for path in self.path.rglob("*") if path.suffix in (".arrow", ".parquet")))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            "Copies by Hugging Face's datasets need that package. Install it with: pip install 'polyfed[huggingface]'"
        ) from error
    return datasets


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the package's own progress bars."""
    shown = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.utils.enable_progress_bars()


huggingface = registered_own(
    "huggingface",
    """Images of a copy that Hugging Face's ``datasets`` wrote to disk: a folder of ``save_to_disk``, or of the hub's Parquet files.

    If it has the splits train and test, they are the parts; of a copy with train and validation alone (ImageNet), the latter is the test
    part; otherwise each domain is split by class, whole groups together. Images without a label are left out. Nothing is downloaded.
    Needs the extra ``polyfed[huggingface]``.
    """,
    root="The folder.",
    find=copied_in,
    before=[
        DataOption("image", "image", "The column of images."),
        DataOption("label", "label", "The column of classes."),
        DataOption("domain", "domain", "The column of domains; a copy without it is one domain."),
        DataOption("group", "", "The column of groups (patients), which no split tears apart; empty for none."),
    ],
)
