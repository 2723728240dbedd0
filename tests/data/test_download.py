"""Downloads from a local server that breaks the connection, is slow, ignores ranges, sends wrong data, or is unavailable."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from helpers.command_line import says
from polyfed.data.registry import data_sets
from polyfed.data.sets.cifar10 import CIFAR10
from polyfed.data.store import download
from polyfed.data.store.download import RemoteFile, get
from polyfed.errors import DataError

CONTENT = bytes(range(256)) * 2000
SHA = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Server(BaseHTTPRequestHandler):
    """The first part of the path selects the failure."""

    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        manner, wanted = self.path.split("/")[1], self.headers.get("Range")
        self.requests.append((manner, wanted))
        first = sum(1 for other, _ in self.requests if other == manner) == 1
        if manner == "gone":
            self.send_error(404)
            return
        if manner == "busy" and first:
            self.send_error(503)
            return
        start = int(wanted.split("=")[1].rstrip("-")) if wanted and manner != "rangeless" else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        body = CONTENT[start:] if manner != "wrong" else b"x" * (len(CONTENT) - start)
        self.send_response(206 if start else 200)
        if manner == "endless":
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(CONTENT)
            return
        body += b"more" if manner == "longer" else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if manner in ("truncated", "rangeless") and first:
            body = body[: len(body) // 3]
        if manner == "slow" and first:
            self.wfile.write(body[:1000])
            self.wfile.flush()
            time.sleep(1.5)
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "requests", [])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as made:
        made.handle_error = lambda *args: None  # clients that hang up are meant to
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def remote(server: str, *manners: str) -> RemoteFile:
    return RemoteFile("sub/file.bin", tuple(f"{server}/{manner}/file.bin" for manner in manners), SHA, len(CONTENT))


@pytest.mark.parametrize("manner", ["sound", "truncated", "rangeless", "busy"])
def test_downloads_recover_from_failures(server, tmp_path, manner):
    told = []
    assert get([remote(server, manner)], tmp_path, lambda *progress: told.append(progress)) == ["sub/file.bin"]
    assert (tmp_path / "sub" / "file.bin").read_bytes() == CONTENT
    assert told[-1] == ("sub/file.bin", len(CONTENT), len(CONTENT))
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == ["file.bin"]
    if manner == "truncated":
        assert Server.requests[1] == (manner, f"bytes={len(CONTENT) // 3}-"), "the download resumes where it stopped"
    before = len(Server.requests)
    assert get([remote(server, manner)], tmp_path) == [] and len(Server.requests) == before, "existing files are not requested"


def test_a_slow_response_times_out_and_is_resumed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.5)
    assert get([remote(server, "slow")], tmp_path) and (tmp_path / "sub" / "file.bin").read_bytes() == CONTENT
    assert Server.requests[1][1] is not None


def test_mirrors_are_tried_in_turn(server, tmp_path):
    assert get([remote(server, "gone", "wrong", "sound")], tmp_path)
    assert [manner for manner, _ in Server.requests] == ["gone", "wrong", "sound"]


def test_a_stopped_download_resumes_and_a_damaged_one_restarts(server, tmp_path):
    part = tmp_path / "sub" / "file.bin.part"
    part.parent.mkdir()
    part.write_bytes(CONTENT[:1000])
    assert get([remote(server, "sound")], tmp_path) and Server.requests == [("sound", "bytes=1000-")]
    (tmp_path / "sub" / "file.bin").unlink()
    part.write_bytes(b"damaged")
    assert get([remote(server, "sound")], tmp_path) and Server.requests[1:] == [("sound", "bytes=7-"), ("sound", None)]
    (tmp_path / "sub" / "file.bin").unlink()
    part.write_bytes(CONTENT)
    assert get([remote(server, "sound")], tmp_path), "the part file was complete"


def test_failed_downloads_are_explained(server, tmp_path):
    with pytest.raises(DataError, match=r"Could not download sub/file\.bin.*gone.*404.*wrong.*wrong checksum"):
        get([remote(server, "gone", "wrong")], tmp_path)
    with pytest.raises(DataError, match="no response"):
        get([RemoteFile("a", ("http://127.0.0.1:9/a",), SHA, 10)], tmp_path)
    (tmp_path / "b").write_text("mine")
    with pytest.raises(DataError, match="Move or delete the file"):
        get([RemoteFile("b", ("http://127.0.0.1:9/b",), SHA, 10)], tmp_path)
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize(
    ("manner", "said"), [("longer", "announces 512,004 bytes"), ("endless", "sent more than the 512,000 bytes")]
)
def test_a_mirror_that_sends_too_much_is_skipped(server, tmp_path, manner, said):
    with pytest.raises(DataError, match=said):
        get([remote(server, manner)], tmp_path)
    assert len(Server.requests) == 1 and not list((tmp_path / "sub").iterdir()), "one request, and no partial file is kept"
    assert get([remote(server, manner, "sound")], tmp_path), "the next mirror is tried"
    (tmp_path / "sub" / "file.bin").unlink()
    (tmp_path / "sub" / "file.bin.part").write_bytes(CONTENT + b"more")
    assert get([remote(server, "sound")], tmp_path), "a part file that is too long is discarded"


def test_every_file_has_a_bound_and_an_encrypted_mirror_comes_first():
    files = [file for name in data_sets.names() if (found := data_sets.find(name).extra.get("declaration")) for file in found.files]
    assert len(files) >= 10
    for file in files:
        assert 0 < file.max_bytes <= 300 * 10**6, file.name
        encrypted = [url.startswith("https://") for url in file.urls]
        assert encrypted[0] and encrypted == sorted(encrypted, reverse=True), file.name


def test_the_commands(polyfed, server, monkeypatch, tmp_path):
    assert {row["name"]: row["get"] for row in polyfed("data", "ls", "--json").json["data_sets"]}["pacs"] == "manual download"
    assert "cifar10" in polyfed("data", "ls").out
    says(polyfed("data", "get", "pacs", "--root", "d"), "must be downloaded manually", "PACS/<domain>/<class>/*", "Terms")
    says(polyfed("data", "get", "digits-mini", "--root", "d"), "has no files to download")
    declared = replace(CIFAR10, files=(remote(server, "sound"),))
    monkeypatch.setitem(data_sets.find("cifar10").extra, "declaration", declared)
    shown = polyfed("data", "get", "cifar10", "--root", "d")
    assert shown.code == 0 and "Downloaded 1 of 1 files to d" in shown.out
    assert polyfed("data", "get", "cifar10", "--root", "d", "--json").json["downloaded"] == []


def test_pack_makes_an_archive_that_is_read_like_the_folder(polyfed, tmp_path):
    import numpy as np
    from PIL import Image

    from polyfed.data.sets.vlcs import CLASSES, DOMAINS

    for domain in DOMAINS:
        for label in CLASSES:
            folder = tmp_path / "VLCS" / domain / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(np.full((30, 20, 3), 10 * number, np.uint8)).save(folder / f"{number}.png")
    made = polyfed("data", "pack", "VLCS", "--size", "16", "--out", "small/VLCS.tar")
    says(made, "Cannot write small/VLCS.tar")
    (tmp_path / "small").mkdir()
    made = polyfed("data", "pack", "VLCS", "--size", "16", "--out", "small/VLCS.tar", "--json").json
    assert made["images"] == 80
    data = data_sets.build("vlcs(size=16)", root=str(tmp_path / "small"))
    x, _ = data.domains[0].train.batch(slice(None))
    assert x.shape == (18, 3, 16, 16) and set(x.flatten().tolist()) <= {*range(0, 32)}
    says(polyfed("data", "pack", "VLCS", "--size", "16", "--out", "small/VLCS.tar"), "must be a new file")
    (tmp_path / "VLCS" / "SUN09" / "dog" / "0.png").write_bytes(b"x")
    says(polyfed("data", "pack", "VLCS", "--size", "16", "--out", "small/again.tar"), "cannot be read as an image")
    assert not (tmp_path / "small" / "again.tar").exists()
