"""Requests over Python's own HTTP client: answers whole, connections used again, errors those that Flower tries again after.

And Flower's waits: shortened in the modules that have them, and as they are where a release has others.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib
import logging
import select
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

import httpx

from polyfed.flower.deploy.processes import free_port
from polyfed.flower.wire import direct_http, waits
from polyfed.flower.wire.direct_http import DirectTransport, send_directly, send_over_grid_directly

LARGE = bytes(range(256)) * 20_000


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[set[int]] = set()

    def do_POST(self) -> None:
        self.connections.add(self.client_address[1])
        if self.path == "/refused":
            self.send_response(413)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"no")
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/gone":
            self.close_connection = True
            return
        if self.path == "/late":
            threading.Event().wait(1)
        self.send_response(200)
        if self.path == "/pieces":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
                self.wfile.write(piece)
            return
        content = body[::-1] + self.headers.get("X-Word", "").encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        # As a server does that was restarted: nothing says so before the next request.
        self.close_connection = self.path == "/last"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(transport=DirectTransport(httpx.create_ssl_context()), timeout=30) as client:
        yield client


def test_answers_are_whole_and_a_connection_is_used_again(url: str, client: httpx.Client) -> None:
    Handler.connections.clear()
    for _ in range(3):
        answer = client.post(f"{url}/", content=LARGE, headers={"X-Word": "end"})
        assert answer.status_code == 200 and answer.content == LARGE[::-1] + b"end"
    assert len(Handler.connections) == 1
    assert client.post(f"{url}/pieces").content == b"onetwo"
    assert client.post(f"{url}/", content=b"ab").content == b"ba"


def test_two_requests_at_a_time_have_a_connection_each(url: str, client: httpx.Client) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(client.post(f"{url}/", content=LARGE).content)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [LARGE[::-1]] * 4


def test_a_connection_that_the_server_closed_is_not_used_again(url: str, client: httpx.Client) -> None:
    for _ in range(3):
        assert client.post(f"{url}/last", content=b"ab").content == b"ba"
        transport = client._transport
        assert isinstance(transport, DirectTransport)
        ((kept,),) = transport.idle.values()
        assert select.select([kept.sock], [], [], 60)[0], "the server has not closed the connection"


def test_the_answer_to_a_body_that_is_refused_unread_is_seen(url: str, client: httpx.Client) -> None:
    assert client.post(f"{url}/refused", content=b"ab").status_code == 413


def test_errors_are_those_that_flower_tries_again_after(url: str, client: httpx.Client) -> None:
    with pytest.raises(httpx.ConnectError):
        client.post(f"http://127.0.0.1:{free_port()}/")
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"{url}/late", timeout=0.1)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        client.post(f"{url}/gone")


def test_flowers_clients_send_directly_unless_there_is_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.protobuf.client import ProtobufClient

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    assert send_directly() and send_directly(), "a second time changes nothing"
    client = ProtobufClient(url, timeout=7.0)
    assert client._client.post(f"{url}/", content=b"ab").content == b"ba" and client._client.timeout.read == 7.0

    class Grid:
        _runtime_client, _cert = client, None

    with contextlib.closing(client._client):
        assert send_over_grid_directly(Grid())
    with contextlib.closing(client._client):
        assert client._client.post(f"{url}/", content=b"ab").content == b"ba"
    assert not send_over_grid_directly(object())
    monkeypatch.setattr(direct_http.urllib.request, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert not send_directly() and not send_over_grid_directly(Grid())


def test_a_node_of_this_release_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    node = importlib.import_module(waits.NODE)
    monkeypatch.setattr(node, "time", time)
    monkeypatch.setattr(node, "pull_objects", node.pull_objects)
    slept: list[float] = []
    monkeypatch.setattr(waits.time, "sleep", slept.append)
    assert waits.shorten_node() and waits.shorten_node(), "a second time changes nothing"
    for seconds in (3, 0.5, 0.01):
        node.time.sleep(seconds)
    assert slept == [0.5, 0.05, 0.01]
    assert node.time.monotonic() > 0
    assert node.pull_objects.keywords == {"initial_backoff": 0.1, "backoff_cap": 0.5}


def test_the_server_asks_again_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = importlib.import_module(waits.SERVER)
    monkeypatch.setattr(grid, "pull_objects", grid.pull_objects)
    assert waits.shorten_server()
    assert grid.pull_objects.keywords["initial_backoff"] == 0.1


def test_clientapps_ask_again_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    clientapp = importlib.import_module(waits.CLIENTAPP)
    monkeypatch.setattr(clientapp, "pull_and_inflate_object_from_tree", clientapp.pull_and_inflate_object_from_tree)
    assert waits.shorten_clientapp()
    assert clientapp.pull_and_inflate_object_from_tree.keywords == {"initial_backoff": 0.1, "backoff_cap": 0.5}


def test_another_release_keeps_its_own_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waits, "NODE", "flwr.no_such_module")
    with caplog.at_level(logging.INFO, "polyfed"):
        assert not waits.shorten_node()
    assert "its waits are not shortened" in caplog.text
