"""Files of data sets from the network: several mirrors, checksums, and downloads that go on where they stopped."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.errors import DataError

CHUNK = 1 << 16
TIMEOUT_SECONDS = 30.0
TRIES = 4
"""How often a mirror is asked again after an answer that broke off."""
_BROKEN = (OSError, http.client.HTTPException)

Progress = Callable[[str, int, int | None], None]
"""Called with the file, the bytes that are there, and the bytes there will be, where that is known."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    Args:
        name: Where it belongs, below the folder of the data set.
        urls: Where it may be had, in the order in which they are tried.
        checksum: The algorithm and the digits: ``md5:...`` or ``sha256:...``.
        most_bytes: The size that no honest copy exceeds; a mirror that sends more is given up.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str
    most_bytes: int


def get(files: Sequence[RemoteFile], root: Path, progress: Progress = lambda name, there, whole: None) -> list[str]:
    """Download what is not there yet; what is there and sound stays.

    Args:
        files: The files wanted.
        root: The folder they go to.
        progress: Is told how far it is.

    Returns:
        The names of the files that were downloaded now.
    """
    fetched = []
    for file in files:
        target = root / file.name
        if target.is_file():
            if is_sound(target, file.checksum):
                continue
            raise DataError(
                f"{target} is not the file that is wanted: its checksum is not {file.checksum}. Move it away, then try again."
            )
        _fetch(file, target, progress)
        fetched.append(file.name)
    return fetched


def is_sound(path: Path, checksum: str) -> bool:
    """Whether a file has this checksum."""
    algorithm, _, digits = checksum.partition(":")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest() == digits


def _fetch(file: RemoteFile, target: Path, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    failures = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        # What is left of an earlier try may be damaged: if its end does not fit, the same mirrors are asked for all of it.
        for url in (*file.urls, *(file.urls if resumed else ())):
            problem = _from_mirror(url, part, file.most_bytes, lambda there, whole: progress(file.name, there, whole))
            if problem:
                failures.append(f"{url}: {problem}")
            elif is_sound(part, file.checksum):
                os.replace(part, target)
                return
            else:
                part.unlink()
                failures.append(f"{url}: what came has another checksum than {file.checksum}")
    except OSError as error:
        raise DataError(f"{file.name} cannot be written to {target.parent}: {error.strerror or error}.") from error
    raise DataError(
        f"{file.name} could not be downloaded. {'. '.join(dict.fromkeys(failures))}. Try again later (what came is kept), or put the file into "
        f"{target.parent} yourself."
    )


def _from_mirror(url: str, part: Path, most: int, progress: Callable[[int, int | None], None]) -> str:
    """Download to the part file, going on where it ends; what went wrong in the end, or nothing."""
    problem = ""
    if part.exists() and part.stat().st_size > most:
        part.unlink()
    for _ in range(TRIES):
        there = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"User-Agent": "polyfed", **({"Range": f"bytes={there}-"} if there else {})})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                # A server that knows no ranges sends everything from the start.
                there = there if answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0
                expected = answer.headers.get("Content-Length")
                whole = None if expected is None else there + int(expected)
                if whole is not None and whole > most:
                    return f"the server announces {whole:,} bytes, and the file has at most {most:,}"
                _write(answer, part, there, whole, most, progress)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return ""  # all of it is there
            problem = f"the server says {error.code} {error.reason}"
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return problem
        except _TooLong:
            part.unlink()
            return f"more than {most:,} bytes came, and the file has at most as many"
        except _Disk as error:
            raise error.cause from error
        except (*_BROKEN, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            problem = f"no answer, or one that broke off ({reason})"
        else:
            if whole is None or part.stat().st_size >= whole:
                return ""
            problem = f"the answer broke off after {part.stat().st_size:,} of {whole:,} bytes"
    return problem


class _TooLong(Exception):
    """More came than the file can have."""


class _Disk(Exception):
    """Writing failed, not the network; both raise OSError."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _write(
    answer: http.client.HTTPResponse,
    part: Path,
    there: int,
    whole: int | None,
    most: int,
    progress: Callable[[int, int | None], None],
) -> None:
    try:
        stream = part.open("r+b" if there else "wb")
    except OSError as error:
        raise _Disk(error) from error
    with stream:
        stream.seek(there)
        while chunk := answer.read1(CHUNK):
            if there + len(chunk) > most:
                raise _TooLong
            try:
                stream.write(chunk)
            except OSError as error:
                raise _Disk(error) from error
            there += len(chunk)
            progress(there, whole)
