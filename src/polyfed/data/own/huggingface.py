"""Read images from a local copy saved by Hugging Face ``datasets``: ``huggingface(root="pacs_copy")``, or its path alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from polyfed.data.declaration import DataOption
from polyfed.data.own.own_images import SPLIT_WORDS, OwnImage, OwnImages, registered_own
from polyfed.data.own.table_columns import choose_group, group_option, unused_columns
from polyfed.data.store.archives import FileIdentity, contents, identities
from polyfed.data.store.cache import HUGGING_FACE, cache_folder
from polyfed.errors import DataError, MissingExtra, nearest
from polyfed.settings import AUTO

LAYOUT = "Hugging Face copy"
READER = 'huggingface(root="FOLDER"'
MARKS = ("dataset_dict.json", "state.json")
"""Files written by ``save_to_disk``."""


def is_copy(root: str | Path) -> bool:
    """Return True if a folder looks like such a copy."""
    folder = Path(root).expanduser()
    return folder.is_dir() and (any((folder / mark).is_file() for mark in MARKS) or bool(_parquet_files(folder)))


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def find(root: Path, image: str = "image", label: str = "label", domain: str = "domain", group: str = AUTO) -> OwnImages:
    """Return the images of a copy, not decoded yet."""
    tree = _CopyTree(root, image)
    used = (image, label, domain)
    group = choose_group(str(root), group, tree.columns(), "", used, READER)
    by_split: dict[str, list[OwnImage]] = {}
    total = 0
    for split, rows in tree.splits.items():
        for name in (label, domain if domain != "domain" else "", group):
            if name:
                tree.require(name, rows.column_names)
        labels = _values(rows, label)
        domains = _values(rows, domain) if domain in rows.column_names else [root.resolve().name] * len(rows)
        groups = _values(rows, group) if group else [""] * len(rows)
        facts = enumerate(zip(domains, labels, groups, strict=True))
        by_split[split] = [OwnImage(f"{split}/{row}", *fact) for row, fact in facts if fact[1]]
        total += len(rows)
    parts = _split_roles([split for split, images in by_split.items() if images])
    listed = [replace(image, split=parts.get(split, "")) for split, images in by_split.items() for image in images]
    if not listed:
        raise DataError(f"{root} has no images with a label in the column {label!r}.")
    features = [rows.features[label] for rows in tree.splits.values()]
    declared = next((list(feature.names) for feature in features if hasattr(feature, "names")), [])
    unlabelled = total - len(listed)
    return OwnImages(
        root=root,
        name=root.resolve().name,
        tree=tree,
        layout=LAYOUT,
        images=sorted(listed, key=lambda each: each.name),
        classes=tuple(dict.fromkeys([*declared, *sorted({each.label for each in listed})])),
        reader=READER,
        notes=(
            *((f"{root}: skipping {unlabelled:,} of {total:,} images, which have no label.",) if unlabelled else ()),
            *unused_columns(str(root), tree.columns(), (*used, group)),
        ),
    )


def _split_roles(splits: Sequence[str]) -> dict[str, str]:
    """Map each split of the copy to train, validation or test. Return an empty mapping if polyfed chooses the split."""
    parts = {split: SPLIT_WORDS.get(split.lower(), "") for split in splits}
    if {"train", "test"} <= set(parts.values()):
        return parts
    if sorted(parts.values()) == ["train", "validation"]:
        return {split: "train" if part == "train" else "test" for split, part in parts.items()}
    return {}


def _values(rows: Any, column: str) -> list[str]:
    """Return a column as text, with class names instead of numbers. A missing value is empty; the hub writes it as -1."""
    feature = rows.features[column]
    if not hasattr(feature, "int2str"):
        return ["" if value is None else str(value) for value in rows[column]]
    return ["" if value is None or value < 0 else feature.int2str(value) for value in rows[column]]


class _CopyTree:
    """The images of a copy as a file tree with the names ``<split>/<row>``."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column

    @cached_property
    def splits(self) -> dict[str, Any]:
        """Rows by split, with encoded images."""
        try:
            import datasets
        except ImportError as error:
            raise MissingExtra(
                "Reading copies by Hugging Face datasets requires that package. Install it with: pip install 'polyfed[huggingface]'"
            ) from error
        if not is_copy(self.path):
            raise DataError(
                f"{self.path} is not a copy by Hugging Face datasets: {contents(self.path)}. Expected a folder written by save_to_disk, or "
                "Parquet files from the hub."
            )
        try:
            with _no_progress_bars(datasets):
                found = self._read(datasets)
        except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"Cannot read {self.path} as a copy by Hugging Face datasets: {error}.") from error
        splits = dict(found) if isinstance(found, dict) else {"all": found}
        for rows in splits.values():
            self.require(self.column, rows.column_names)
        return {name: rows.cast_column(self.column, datasets.Image(decode=False)) for name, rows in splits.items()}

    def columns(self) -> Mapping[str, Callable[[], list[str]]]:
        """Return a function for the values of each column over all splits."""
        names = dict.fromkeys(name for rows in self.splits.values() for name in rows.column_names)

        def values(name: str) -> list[str]:
            return [str(value) for rows in self.splits.values() if name in rows.column_names for value in rows[name]]

        return {name: partial(values, name) for name in names}

    def _read(self, datasets: Any) -> Any:
        if any((self.path / mark).is_file() for mark in MARKS):
            return datasets.load_from_disk(str(self.path))
        files: dict[str, list[str]] = {}
        for file in _parquet_files(self.path):
            word = file.name.split("-")[0].split(".")[0].lower()
            files.setdefault(word if word in SPLIT_WORDS else "all", []).append(str(file))
        copies = cache_folder() / HUGGING_FACE
        copies.mkdir(parents=True, exist_ok=True)
        copies.chmod(0o700)
        return datasets.load_dataset("parquet", data_files=files, cache_dir=str(copies))

    def require(self, column: str, columns: Sequence[str]) -> None:
        """Reject a missing column."""
        if column not in columns:
            raise DataError(
                f"{self.path} has no column {column!r}. {nearest(column, columns)} Specify columns with "
                "huggingface(image=..., label=..., domain=...)."
            )

    @cached_property
    def names(self) -> Sequence[str]:
        return [f"{split}/{row}" for split, rows in self.splits.items() for row in range(len(rows))]

    def read(self, name: str) -> bytes:
        """Return the encoded image."""
        split, _, row = name.partition("/")
        found = self.splits[split][int(row)][self.column]
        if found is None or (found["bytes"] is None and not found["path"]):
            raise DataError(f"{self.path}, {name}: the image is missing.")
        if found["bytes"] is not None:
            content: bytes = found["bytes"]
            return content
        try:
            return Path(found["path"]).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}, {name}: cannot read {found['path']}: {error.strerror or error}.") from error

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        """Return the identity of all files of the copy."""
        return identities(sorted(path for path in self.path.rglob("*") if path.suffix in (".arrow", ".parquet")))


@contextlib.contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    disabled = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            datasets.utils.enable_progress_bars()


huggingface = registered_own(
    "huggingface",
    """Images from a copy that Hugging Face ``datasets`` saved to disk: a folder of ``save_to_disk``, or Parquet files from the hub.

    If the copy has the splits train and test, they are used. If it has only train and validation (ImageNet), validation is used for
    testing. Otherwise each domain is split by class, with whole groups together. Images without a label are skipped. Nothing is
    downloaded. Like a table, a copy is rejected if a column looks like groups, until the option ``group`` names a column or is empty.
    Requires the extra ``polyfed[huggingface]``.
    """,
    root="The folder.",
    find=find,
    before=[
        DataOption("image", "image", "Column of images."),
        DataOption("label", "label", "Column of classes."),
        DataOption("domain", "domain", "Column of domains. A copy without it is a single domain."),
        replace(
            group_option,
            text="Column of groups (patients), which are never split. auto: none, if no column looks like one. Empty: none.",
        ),
    ],
)
