"""Folders, tar files and zip files read in the same way: a list of names, and the bytes behind each.

Nothing is ever unpacked to disk, so a hostile archive cannot write anywhere.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import DataError

T = TypeVar("T")
A = TypeVar("A", tarfile.TarFile, zipfile.ZipFile)
FileIdentity: TypeAlias = tuple[str, int, int]
"""Path, bytes and time of change in nanoseconds: another file under the same name differs in one of them."""

DEEPEST_FOLDER = 5
LISTED_ENTRIES = 12
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
LARGEST_MEMBER = 4 * 2**30
"""Bytes that one file of an archive may have when it is unpacked; the largest of the published sets have less than 1 GiB."""
MAX_MEMBERS = 5_000_000
"""Files that an archive may hold; ImageNet has 1.4 million."""
UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""What reading a damaged archive may raise."""


class FileTree(Protocol):
    """Files under names with ``/`` between their folders."""

    @property
    def path(self) -> Path:
        """Where the tree lies on disk."""

    @property
    def names(self) -> Sequence[str]:
        """All plain files, sorted; hidden ones are left out."""

    def read(self, name: str) -> bytes:
        """The content of a file."""

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        """What tells these files from others."""


class FolderTree:
    """The files of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def names(self) -> Sequence[str]:
        return _text_names(_walk(self.path, "", DEEPEST_FOLDER), self.path)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise DataError(f"Cannot read {self.path / name}: {error.strerror or error}.") from error

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        return identities(self.path / name for name in names)


class _ArchiveTree(Generic[A]):
    """The files of an archive, opened by each process: a forked one that shared the file would read where another one has moved to."""

    kind: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, A] | None = None

    def _open(self) -> A:
        raise NotImplementedError

    @property
    def _archive(self) -> A:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), self._open()
            except UNREADABLE as error:
                raise DataError(f"{self.path} is no readable {self.kind} archive: {error}. Get the file again.") from error
        return self._opened[1]

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        return identities([self.path])


class _TarTree(_ArchiveTree[tarfile.TarFile]):
    """The files of a tar archive, compressed or not."""

    kind = "tar"

    def _open(self) -> tarfile.TarFile:
        archive = tarfile.TarFile.open(self.path)
        weakref.finalize(self, archive.close)
        return archive

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        try:
            members = _counted(self._archive, self.path)
            return {member.name.removeprefix("./"): member for member in members if member.isfile() and _is_shown(member.name)}
        except UNREADABLE as error:
            raise DataError(f"{self.path} is a damaged tar archive: {error}. Get the file again.") from error

    @cached_property
    def names(self) -> Sequence[str]:
        return _text_names(self._members, self.path)

    def read(self, name: str) -> bytes:
        if name not in self._members:
            raise DataError(f"{self.path} holds no {name}.")
        member = self._members[name]
        _require_bounded(self.path, name, member.size)
        try:
            stream = self._archive.extractfile(member)
            content = stream.read() if stream is not None else b""
        except UNREADABLE as error:
            raise DataError(f"{self.path} is damaged at {name}: {error}. Get the file again.") from error
        if len(content) != member.size:
            raise DataError(f"{self.path} is cut off at {name}: {len(content)} of {member.size} bytes. Get the file again.")
        return content


class _ZipTree(_ArchiveTree[zipfile.ZipFile]):
    """The files of a zip archive."""

    kind = "zip"

    def _open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    @cached_property
    def names(self) -> Sequence[str]:
        infos = _counted(self._archive.infolist(), self.path)
        return sorted(info.filename for info in infos if not info.is_dir() and _is_shown(info.filename))

    def read(self, name: str) -> bytes:
        try:
            _require_bounded(self.path, name, self._archive.getinfo(name).file_size)
            return self._archive.read(name)
        except (KeyError, RuntimeError, NotImplementedError, *UNREADABLE) as error:
            raise DataError(f"{self.path} is damaged at {name}: {error}. Get the file again.") from error


class JoinedTree:
    """The files of several folders or archives that belong together, under names that differ."""

    def __init__(self, path: Path, trees: Sequence[FileTree]) -> None:
        self.path, self.trees = path, trees

    @cached_property
    def _tree_of(self) -> dict[str, FileTree]:
        return {name: tree for tree in self.trees for name in tree.names}

    @cached_property
    def names(self) -> Sequence[str]:
        return sorted(self._tree_of)

    def read(self, name: str) -> bytes:
        return self._tree_of[name].read(name)

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        by_tree: dict[FileTree, list[str]] = {}
        for name in names:
            by_tree.setdefault(self._tree_of[name], []).append(name)
        return [one for tree, own in by_tree.items() for one in tree.identity(own)]


def _counted(members: Iterable[T], path: Path) -> Iterator[T]:
    """The members of an archive, as long as there are not too many."""
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise DataError(f"{path} holds more than {MAX_MEMBERS:,} files, which is not a data set that can be read.")
        yield member


def _text_names(names: Iterable[str], path: Path) -> list[str]:
    """The names, sorted; one that is no UTF-8 text, which no table or run folder could hold, is refused."""
    found = sorted(names)
    for name in found:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise DataError(
                f"{path}: the name {shown} is not UTF-8 text, so an older or another system wrote it. Rename it, with all like it "
                "(convmv -f latin1 -t utf8 -r --notest FOLDER)."
            ) from error
    return found


def _require_bounded(path: Path, name: str, size: int) -> None:
    """Refuse a file of an archive that would take too much memory."""
    if size > LARGEST_MEMBER:
        raise DataError(
            f"{name} in {path} would take {size:,} bytes; files of up to {LARGEST_MEMBER:,} are read. It was not unpacked."
        )


def read_npz(path: Path) -> Mapping[str, NDArray[Any]]:
    """The arrays of an npz file, none of them pickled and none beyond the size that a file of an archive may have."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _require_bounded(path, info.filename, info.file_size)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, *UNREADABLE) as error:
        raise DataError(f"{path} cannot be read: {error}. Get the file again.") from error


def file_tree(path: Path) -> FileTree:
    """The files of a folder or an archive."""
    if path.is_dir():
        return FolderTree(path)
    return _ZipTree(path) if path.name.lower().endswith(".zip") else _TarTree(path)


def existing_trees(root: Path, candidates: Iterable[str]) -> list[FileTree]:
    """Those of the candidate folders and archives that exist under a folder, in the order given."""
    paths = [root / candidate for candidate in candidates]
    return [file_tree(path) for path in paths if path.is_dir() or (path.is_file() and path.name.lower().endswith(ARCHIVE_SUFFIXES))]


def joined_archives(root: Path, places: Iterable[str], names: Sequence[str]) -> list[JoinedTree]:
    """For each place under a folder that holds any of these archives: all of them that are there, as one tree."""
    return [JoinedTree(root / place, trees) for place in places if (trees := existing_trees(root / place, names))]


def identities(paths: Iterable[Path]) -> list[FileIdentity]:
    """Path, bytes and time of change of each file."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
        found.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return found


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def contents(folder: Path) -> str:
    """What a folder holds, in a few words, for messages."""
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is a file, not a folder"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir() if _is_shown(entry.name))
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - LISTED_ENTRIES} more" if len(names) > LISTED_ENTRIES else ""
    return f"the folder holds {', '.join(names[:LISTED_ENTRIES])}{more}"


def _walk(folder: Path, prefix: str, depth: int) -> list[str]:
    found: list[str] = []
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"Cannot list {folder}: {error.strerror or error}.") from error
    for entry in entries:
        if not _is_shown(entry.name):
            continue
        if entry.is_file():
            found.append(prefix + entry.name)
        elif depth > 1 and entry.is_dir():
            found += _walk(folder / entry.name, f"{prefix}{entry.name}/", depth - 1)
    return found


def _is_shown(name: str) -> bool:
    """Hidden files are not data: archives made on a Mac hold a ``._name`` for each real file."""
    return not any((part.startswith(".") and part != ".") or part == "__MACOSX" for part in name.split("/"))
