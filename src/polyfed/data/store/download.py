"""Download data set files from several mirrors, with checksums, and resume partial downloads."""

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
"""Number of attempts per mirror if the connection breaks."""
_BROKEN = (OSError, http.client.HTTPException, ValueError)

Progress = Callable[[str, int, int | None], None]
"""Receives the file name, the number of bytes so far, and the total number of bytes if it is known."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    Attributes:
        name: Path relative to the data set folder.
        urls: Mirrors, in the order in which they are tried.
        checksum: Algorithm and digits: ``md5:...`` or ``sha256:...``.
        max_bytes: Largest plausible size. A mirror that sends more is skipped.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str
    max_bytes: int


def get(files: Sequence[RemoteFile], root: Path, progress: Progress = lambda name, received, total: None) -> list[str]:
    """Download missing files to a folder and verify existing ones. Return the names of the downloaded files."""
    fetched = []
    for file in files:
        target = root / file.name
        if target.is_file():
            if _has_checksum(target, file.checksum):
                continue
            raise DataError(f"{target} has the wrong checksum (expected {file.checksum}). Move or delete the file, then try again.")
        _fetch(file, target, progress)
        fetched.append(file.name)
    return fetched


def _has_checksum(path: Path, checksum: str) -> bool:
    algorithm, _, digits = checksum.partition(":")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest() == digits


def _fetch(file: RemoteFile, target: Path, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    failures = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        # A partial file from an earlier attempt may be damaged. If the checksum fails, the same mirrors are tried from the start.
        for url in (*file.urls, *(file.urls if resumed else ())):
            problem = _download(url, part, file.max_bytes, lambda received, total: progress(file.name, received, total))
            if problem:
                failures.append(f"{url}: {problem}")
            elif _has_checksum(part, file.checksum):
                os.replace(part, target)
                return
            else:
                part.unlink()
                failures.append(f"{url}: the downloaded file has the wrong checksum (expected {file.checksum})")
    except OSError as error:
        raise DataError(f"Cannot write {file.name} to {target.parent}: {error.strerror or error}.") from error
    raise DataError(
        f"Could not download {file.name}. {'. '.join(dict.fromkeys(failures))}. Try again later (partial downloads are kept), or copy the "
        f"file to {target.parent}."
    )


class _NetworkFailure(Exception):
    """A network error, as opposed to a disk error. Both raise OSError."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error))


def _download(url: str, part: Path, limit: int, progress: Callable[[int, int | None], None]) -> str:
    """Download to the part file, resuming at its end. Return the last problem, or an empty text."""
    problem = ""
    if part.exists() and part.stat().st_size > limit:
        part.unlink()
    for _ in range(TRIES):
        received = part.stat().st_size if part.exists() else 0
        try:
            with _open(url, received) as response:
                # A server without range support sends everything from the start.
                received = received if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
                length = response.headers.get("Content-Length", "")
                total = received + int(length) if length.isdecimal() else None
                if total is not None and total > limit:
                    return f"the server announces {total:,} bytes; the limit is {limit:,}"
                with part.open("r+b" if received else "wb") as stream:
                    stream.seek(received)
                    while chunk := _read(response):
                        received += len(chunk)
                        if received > limit:
                            part.unlink()
                            return f"the server sent more than the {limit:,} bytes of the limit"
                        stream.write(chunk)
                        progress(received, total)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return ""  # the part file is complete
            problem = f"the server replied {error.code} {error.reason}"
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return problem
        except _NetworkFailure as error:
            problem = f"no response, or the connection broke ({error})"
        else:
            if total is None or received >= total:
                return ""
            problem = f"the connection broke after {received:,} of {total:,} bytes"
    return problem


def _open(url: str, received: int) -> http.client.HTTPResponse:
    ranges = {"Range": f"bytes={received}-"} if received else {}
    request = urllib.request.Request(url, headers={"User-Agent": "polyfed", **ranges})
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        return response
    except urllib.error.HTTPError:
        raise
    except _BROKEN as error:
        raise _NetworkFailure(error) from error


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)
    except _BROKEN as error:
        raise _NetworkFailure(error) from error
