"""Atomic writes of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from polyfed.runs.folder import atomic_write
from polyfed.runs.folder.atomic_write import CHUNK_BYTES, write_atomically


@pytest.mark.parametrize("data", ["text ä", b"bytes", [b"a" * (CHUNK_BYTES + 1), b"", memoryview(b"b")], []])
def test_what_is_written_is_what_was_given_and_its_hash_is_told(data: str | bytes | list[bytes], tmp_path: Path) -> None:
    whole = data.encode() if isinstance(data, str) else data if isinstance(data, bytes) else b"".join(data)
    (tmp_path / "file").write_bytes(b"before")
    assert write_atomically(tmp_path / "file", data) == hashlib.sha256(whole).hexdigest()
    assert (tmp_path / "file").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"after")
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.replace

    def note_sync(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        sync(handle)

    def note_rename(self: Path, target: Path) -> Path:
        done.append("rename")
        return rename(self, target)

    monkeypatch.setattr(atomic_write.os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    write_atomically(tmp_path / "file", b"x")
    assert done == ["file", "rename", "folder"]
