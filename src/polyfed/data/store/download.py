"""Files of data sets from the network: several mirrors, checksums, and downloads that go on where they stopped."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.errors import DataError

CHUNK = 1 << 16
TIMEOUT_SECONDS = 30.0
TRIES = 4
"""How often a mirror is tried if its answers break off."""
_BROKEN = (OSError, http.client.HTTPException, ValueError)

Progress = Callable[[str, int, int | None], None]
"""Called with the file, the bytes that are there, and the bytes there will be, where that is known."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    Args:
        name: Where it belongs, below the folder of the data set.
        urls: Where it may be had, in the order in which they are tried.
        checksum: The algorithm and the digits: ``md5:...`` or ``sha256:...``.
        max_bytes: The size that no honest copy exceeds; a mirror that sends more is given up.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str
    max_bytes: int


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
            if _is_sound(target, file.checksum):
                continue
            raise DataError(
                f"{target} is not the file that is wanted: its checksum is not {file.checksum}. Move it away, then try again."
            )
        _fetch(file, target, progress)
        fetched.append(file.name)
    return fetched


def _is_sound(path: Path, checksum: str) -> bool:
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
            problem = _from_mirror(url, part, file.max_bytes, lambda there, whole: progress(file.name, there, whole))
            if problem:
                failures.append(f"{url}: {problem}")
            elif _is_sound(part, file.checksum):
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


class _BrokenOff(Exception):
    """The network failed, not the disk; both raise OSError."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error))


def _from_mirror(url: str, part: Path, most: int, progress: Callable[[int, int | None], None]) -> str:
    """Download to the part file, resuming where it ends; return what went wrong in the end, or nothing."""
    problem = ""
    if part.exists() and part.stat().st_size > most:
        part.unlink()
    for _ in range(TRIES):
        there = part.stat().st_size if part.exists() else 0
        try:
            with _answer(url, there) as answer:
                # A server that knows no ranges sends everything from the start.
                there = there if answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0
                expected = answer.headers.get("Content-Length", "")
                whole = there + int(expected) if expected.isdecimal() else None
                if whole is not None and whole > most:
                    return f"the server announces {whole:,} bytes, and the file has at most {most:,}"
                with part.open("r+b" if there else "wb") as stream:
                    stream.seek(there)
                    for chunk in _chunks(answer):
                        there += len(chunk)
                        if there > most:
                            part.unlink()
                            return f"more than {most:,} bytes came, and the file has at most as many"
                        stream.write(chunk)
                        progress(there, whole)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return ""  # all of it is there
            problem = f"the server says {error.code} {error.reason}"
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return problem
        except _BrokenOff as error:
            problem = f"no answer, or one that broke off ({error})"
        else:
            if whole is None or there >= whole:
                return ""
            problem = f"the answer broke off after {there:,} of {whole:,} bytes"
    return problem


def _answer(url: str, there: int) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "polyfed", **({"Range": f"bytes={there}-"} if there else {})})
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        return answer
    except urllib.error.HTTPError:
        raise
    except _BROKEN as error:
        raise _BrokenOff(error) from error


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := answer.read1(CHUNK):
            yield chunk
    except _BROKEN as error:
        raise _BrokenOff(error) from error
