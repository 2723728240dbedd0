"""Read folders, tar files and zip files in the same way, as a list of names with their contents.

Nothing is unpacked to disk, so that a hostile archive cannot write files.
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
"""Path, size in bytes, and modification time in nanoseconds. A changed file differs in at least one of them."""

DEEPEST_FOLDER = 5
LISTED_ENTRIES = 12
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
LARGEST_MEMBER = 4 * 2**30
"""Largest uncompressed size of a file in an archive. Published data sets stay below 1 GiB."""
MAX_MEMBERS = 5_000_000
"""Largest number of files in an archive. ImageNet has 1.4 million."""
UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""Exceptions raised while reading a damaged archive."""


class FileTree(Protocol):
    """Files by their relative paths, with ``/`` as the separator."""

    @property
    def path(self) -> Path:
        """Location on disk."""

    @property
    def names(self) -> Sequence[str]:
        """All regular files that are not hidden, sorted."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        """Return the identity of these files."""


class FolderTree:
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
    """The files of an archive. Each process opens the archive itself, because forked processes would share the file position."""

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
                raise DataError(f"{self.path} is not a readable {self.kind} archive: {error}. Download the file again.") from error
        return self._opened[1]

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        return identities([self.path])


class _TarTree(_ArchiveTree[tarfile.TarFile]):
    kind = "tar"

    def _open(self) -> tarfile.TarFile:
        archive = tarfile.TarFile.open(self.path)
        weakref.finalize(self, archive.close)
        return archive

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        try:
            members = _checked_count(self._archive, self.path)
            return {member.name.removeprefix("./"): member for member in members if member.isfile() and _is_shown(member.name)}
        except UNREADABLE as error:
            raise DataError(f"{self.path} is a damaged tar archive: {error}. Download the file again.") from error

    @cached_property
    def names(self) -> Sequence[str]:
        return _text_names(self._members, self.path)

    def read(self, name: str) -> bytes:
        if name not in self._members:
            raise DataError(f"{self.path} does not contain {name}.")
        member = self._members[name]
        _check_size(self.path, name, member.size)
        try:
            stream = self._archive.extractfile(member)
            content = stream.read() if stream is not None else b""
        except UNREADABLE as error:
            raise DataError(f"{self.path} is damaged at {name}: {error}. Download the file again.") from error
        if len(content) != member.size:
            raise DataError(f"{self.path} is truncated at {name} ({len(content)} of {member.size} bytes). Download the file again.")
        return content


class _ZipTree(_ArchiveTree[zipfile.ZipFile]):
    kind = "zip"

    def _open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    @cached_property
    def names(self) -> Sequence[str]:
        infos = _checked_count(self._archive.infolist(), self.path)
        return sorted(info.filename for info in infos if not info.is_dir() and _is_shown(info.filename))

    def read(self, name: str) -> bytes:
        try:
            _check_size(self.path, name, self._archive.getinfo(name).file_size)
            return self._archive.read(name)
        except (KeyError, RuntimeError, NotImplementedError, *UNREADABLE) as error:
            raise DataError(f"{self.path} is damaged at {name}: {error}. Download the file again.") from error


class JoinedTree:
    """The files of several folders or archives with distinct names, as one tree."""

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
        return [identity for tree, members in by_tree.items() for identity in tree.identity(members)]


def _checked_count(members: Iterable[T], path: Path) -> Iterator[T]:
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise DataError(f"{path} contains more than {MAX_MEMBERS:,} files, which is too many for a data set.")
        yield member


def _text_names(names: Iterable[str], path: Path) -> list[str]:
    """Return the names, sorted. Reject a name that is not UTF-8, because tables and run folders could not contain it."""
    found = sorted(names)
    for name in found:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise DataError(
                f"{path}: the name {shown} is not UTF-8 text. Rename this file and all similar ones "
                "(convmv -f latin1 -t utf8 -r --notest FOLDER)."
            ) from error
    return found


def _check_size(path: Path, name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise DataError(f"{name} in {path} was not unpacked: it has {size:,} bytes, and the limit is {LARGEST_MEMBER:,}.")


def read_npz(path: Path) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of an npz file. Reject pickled arrays, and arrays that exceed the size limit."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _check_size(path, info.filename, info.file_size)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, *UNREADABLE) as error:
        raise DataError(f"{path} cannot be read: {error}. Download the file again.") from error


def file_tree(path: Path) -> FileTree:
    """Open a folder or an archive."""
    if path.is_dir():
        return FolderTree(path)
    return _ZipTree(path) if path.name.lower().endswith(".zip") else _TarTree(path)


def existing_trees(root: Path, candidates: Iterable[str]) -> list[FileTree]:
    """Return the candidate folders and archives that exist below a folder, in the given order."""
    paths = [root / candidate for candidate in candidates]
    return [file_tree(path) for path in paths if path.is_dir() or (path.is_file() and path.name.lower().endswith(ARCHIVE_SUFFIXES))]


def joined_archives(root: Path, places: Iterable[str], names: Sequence[str]) -> list[JoinedTree]:
    """Return one tree for each place below a folder that contains any of these archives, with all that exist there."""
    return [JoinedTree(root / place, trees) for place in places if (trees := existing_trees(root / place, names))]


def identities(paths: Iterable[Path]) -> list[FileIdentity]:
    """Return path, size and modification time of each file."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
        found.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return found


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def contents(folder: Path) -> str:
    """Describe the content of a folder for error messages."""
    if not folder.exists():
        return "the folder does not exist"
    if not folder.is_dir():
        return "it is a file, not a folder"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir() if _is_shown(entry.name))
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - LISTED_ENTRIES} more" if len(names) > LISTED_ENTRIES else ""
    return f"the folder contains {', '.join(names[:LISTED_ENTRIES])}{more}"


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
    """Return False for hidden files, which are not data. Archives made on macOS contain a ``._name`` for each real file."""
    return not any((part.startswith(".") and part != ".") or part == "__MACOSX" for part in name.split("/"))
