"""A large tar archive, perhaps with a tar for each class inside: where each file lies is found once, kept in the cache, and read in place.

ImageNet's training archive has 138 GB and 1.3 million headers: walking it takes minutes, so that is not done again for the same file.
"""

from __future__ import annotations

import io
import os
import tarfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from polyfed.data.archives import UNREADABLE, FileIdentity, counted, identities, is_shown, require_bounded, text_names
from polyfed.data.cache import Arrays, cached
from polyfed.errors import DataError

INNER_SUFFIX = ".tar"


class TarOfTars:
    """The files of an uncompressed tar as ``folder/<name>``; those of a tar inside it as ``folder/<its name>/<name>``.

    Args:
        path: The archive.
        folder: What the names shall start with.
    """

    def __init__(self, path: Path, folder: str) -> None:
        self.path, self.folder = path, folder

    @cached_property
    def _stream(self) -> io.FileIO:
        """The archive; it is read with ``pread``, which has no position that forked processes would share."""
        try:
            stream = io.FileIO(self.path)
        except OSError as error:
            raise DataError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        weakref.finalize(self, stream.close)
        return stream

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Where each file starts, and how long it is."""
        found = cached({"tar of tars": 1}, identities([self.path]), self._walked)
        names = found["names"].tobytes().decode().split("\0")
        starts, sizes = found["starts"].tolist(), found["sizes"].tolist()
        return {f"{self.folder}/{name}": (start, size) for name, start, size in zip(names, starts, sizes, strict=True)}

    def _walked(self) -> Arrays:
        try:
            found = list(counted(_files_in(self.path), self.path))
        except UNREADABLE as error:
            raise DataError(f"{self.path} is no tar archive, is compressed or damaged: {error}. Get the file again.") from error
        if not found:
            raise DataError(f"{self.path} holds no files.")
        names, starts, sizes = zip(*found, strict=True)
        text_names(names, self.path)
        text = "\0".join(names).encode()
        return {"names": np.frombuffer(text, np.uint8), "starts": np.array(starts, np.int64), "sizes": np.array(sizes, np.int64)}

    @cached_property
    def names(self) -> Sequence[str]:
        """All plain files, sorted; hidden ones are left out."""
        return sorted(self._places)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        if name not in self._places:
            raise DataError(f"{self.path} holds no {name}.")
        start, size = self._places[name]
        require_bounded(self.path, name, size)
        content = os.pread(self._stream.fileno(), size, start)
        if len(content) != size:
            raise DataError(f"{self.path} is cut off at {name}: {len(content)} of {size} bytes. Get the file again.")
        return content

    def identity(self, names: Iterable[str]) -> list[FileIdentity]:
        """What tells the archive from others."""
        return identities([self.path])

    def __reduce__(self) -> tuple[Any, ...]:
        return TarOfTars, (self.path, self.folder)


def _files_in(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, start and size of every file, those of inner tars in the place of them."""
    with path.open("rb") as stream, tarfile.TarFile(fileobj=stream) as outer:
        for member in _plain_files(outer, path):
            if not member.name.endswith(INNER_SUFFIX):
                yield member.name, member.offset_data, member.size
                continue
            folder = PurePosixPath(member.name).stem
            with path.open("rb") as again, tarfile.TarFile(fileobj=Window(again, member.offset_data, member.size)) as inner:
                for file in _plain_files(inner, path):
                    yield f"{folder}/{file.name}", member.offset_data + file.offset_data, file.size


def _plain_files(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """The members that lie in the archive as they are, one at a time; the archive does not keep them all in memory."""
    for member in counted(iter(archive.next, None), path):
        archive.members.clear()  # type: ignore[attr-defined]
        if member.isfile() and not member.issparse() and is_shown(member.name) and "\0" not in member.name:
            yield member


class Window(io.RawIOBase):
    """A part of a file as a file of its own, so that nothing beyond it is read."""

    def __init__(self, stream: Any, start: int, size: int) -> None:
        self.stream, self.start, self.size, self.at = stream, start, size, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has positions."""
        return True

    def tell(self) -> int:
        """The position, from the start of the part."""
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position."""
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        """What follows, up to the end of the part."""
        left = max(0, self.size - self.at)
        self.stream.seek(self.start + self.at)
        content: bytes = self.stream.read(left if size < 0 else min(size, left))
        self.at += len(content)
        return content
