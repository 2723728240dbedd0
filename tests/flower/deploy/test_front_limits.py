"""What the front refuses of real clients: TLS 1.2, bodies that are too large, and floods. nginx runs as in a deployment, with its own file."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.server
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from helpers.flower_harness import Process, end, logged_process
from polyfed.flower.deploy.certificates import (
    certificate_request,
    load_authority,
    pem,
    pem_key,
    renew_server_certificate,
    serial_of,
    sign_request,
)
from polyfed.flower.deploy.processes import free_port
from polyfed.flower.join.forwarder import client_context, server_context
from polyfed.flower.serve.front import ENROL_PATH, Front
from polyfed.flower.serve.registry import ENROLLED, NodeRecord

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx"),
]
MEGABYTE = 1024 * 1024
KEY = "the Flower key of node-1"
FAST, SLOW = "/v1/fleet/push-object", "/v1/fleet/get-run"
HANG_GUARD = 120.0


class Link(http.server.BaseHTTPRequestHandler):
    """In the place of the SuperLink: takes every body, and leaves one path without an answer until the tests are over."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()

    def do_POST(self) -> None:
        left = int(self.headers.get("Content-Length", 0))
        while left > 0:
            left -= len(self.rfile.read(min(left, MEGABYTE)))
        if self.path == SLOW:
            self.over.wait(HANG_GUARD)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Door:
    """A front that runs, and the certificate of one node."""

    folder: Path
    port: int
    empty: int
    """The port of a second front, behind which nothing listens."""

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def node(self) -> ssl.SSLContext:
        return client_context(self.folder / "ca.crt", self.folder / "node.crt", self.folder / "node.key")

    def stranger(self) -> ssl.SSLContext:
        return client_context(self.folder / "ca.crt")


HEADERS = {"flwr-public-key": base64.b64encode(KEY.encode()).decode()}
KEY_LINE = f"flwr-public-key: {HEADERS['flwr-public-key']}\r\n"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("front")
    folder.chmod(0o755)
    authority = load_authority(folder, "test")
    renew_server_certificate(folder, authority, [])
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = sign_request(authority, certificate_request(key, "x"), "node-1")
    (folder / "node.key").write_bytes(pem_key(key))
    (folder / "node.crt").write_bytes(pem(certificate))
    link = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Link)
    link.daemon_threads = True
    link.socket = server_context(folder / "server.crt", folder / "server.key").wrap_socket(link.socket, server_side=True)
    threading.Thread(target=link.serve_forever, daemon=True).start()
    record = NodeRecord("node-1", ENROLLED, serial=serial_of(certificate), key=KEY)
    programs, ports = list[Process](), list[int]()
    try:
        for name, behind in (("nginx", link.server_address[1]), ("empty", free_port())):
            ports.append(free_port())
            front = Front(folder / name, "127.0.0.1", ports[-1], behind, free_port(), "secret", folder, folder / "ca.crt")
            front.write([record])
            programs.append(logged_process(name, front.command(), folder / f"{name}.log", {}, folder))
            wait_until_open(ports[-1])
        yield Door(folder, *ports)
    finally:
        Link.over.set()
        for program in programs:
            end(program)
        link.shutdown()
        link.server_close()


def wait_until_open(port: int) -> None:
    deadline = time.monotonic() + HANG_GUARD
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def openssl(door: Door, version: str) -> subprocess.CompletedProcess[str]:
    words = ["openssl", "s_client", "-connect", f"localhost:{door.port}", "-CAfile", str(door.folder / "ca.crt"), version]
    return subprocess.run(words, input="", capture_output=True, text=True, timeout=HANG_GUARD, check=False)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_openssl_gets_in_with_tls_1_3_and_not_with_1_2(door: Door) -> None:
    newest, older = openssl(door, "-tls1_3"), openssl(door, "-tls1_2")
    assert newest.returncode == 0 and "TLSv1.3" in newest.stdout
    assert older.returncode != 0 and "alert protocol version" in older.stderr, older.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs the program curl")
def test_curl_gets_in_with_tls_1_3_and_not_with_1_2(door: Door) -> None:
    words = ["curl", "-sS", "--cacert", str(door.folder / "ca.crt"), "-X", "POST", f"{door.url}{ENROL_PATH}", "-o", "/dev/null"]
    newest = subprocess.run(
        [*words, "--tlsv1.3", "-w", "%{http_code}"], capture_output=True, text=True, timeout=HANG_GUARD, check=False
    )
    older = subprocess.run([*words, "--tls-max", "1.2"], capture_output=True, text=True, timeout=HANG_GUARD, check=False)
    # Nobody enrols behind this front, so 502 is its own answer.
    assert newest.returncode == 0 and newest.stdout == "502"
    assert older.returncode == 35, older.stderr


def test_a_node_may_send_an_object_of_64_mb_and_no_larger_one(door: Door) -> None:
    with httpx.Client(verify=door.node(), headers=HEADERS, timeout=HANG_GUARD) as client:
        assert client.post(f"{door.url}{FAST}", content=bytes(64 * MEGABYTE)).status_code == 200
        assert client.post(f"{door.url}{FAST}", content=bytes(64 * MEGABYTE + 1)).status_code == 413


def test_a_stranger_may_send_nothing_large(door: Door) -> None:
    with httpx.Client(verify=door.stranger(), timeout=HANG_GUARD) as client:
        assert client.post(f"{door.url}{ENROL_PATH}", content=bytes(16 * 1024 + 1)).status_code == 413
        assert client.post(f"{door.url}{FAST}", content=bytes(64)).status_code == 403
        with pytest.raises(httpx.RemoteProtocolError):
            client.post(f"{door.url}/", content=bytes(64))


def flood(door: Door, context: ssl.SSLContext, path: str, requests: int, headers: str = "") -> Counter[str]:
    """The statuses of requests that are written one behind the other, without a look at the answers in between."""
    found: Counter[str] = Counter()
    text = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{headers}\r\n".encode()
    while (left := requests - found.total()) > 0:
        answers = asyncio.run(asyncio.wait_for(answers_to(door.port, context, text * left, left), HANG_GUARD))
        assert answers, "the front closed the connection without an answer"
        found.update(answers)
    return found


async def answers_to(port: int, context: ssl.SSLContext, data: bytes, wanted: int) -> list[str]:
    """Writes and reads at once in one thread: two threads in one TLS connection can crash Python before 3.13."""
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context, limit=MEGABYTE)
    writer.write(data)
    found = list[str]()
    try:
        while len(found) < wanted and (line := await reader.readline()):
            if line.startswith(b"HTTP/1.1 "):
                found.append(line.split()[1].decode())
    except OSError:
        # nginx ends a connection after a thousand requests; the rest is sent on the next one.
        pass
    finally:
        writer.transport.abort()
    return found


def test_a_flood_of_a_stranger_is_cut_to_ten_requests_a_second(door: Door) -> None:
    statuses = flood(door, door.stranger(), FAST, 300)
    assert statuses["403"] >= 1 and statuses["429"] >= 200 and set(statuses) == {"403", "429"}, statuses


def test_a_flood_of_enrolments_is_cut_to_one_a_second(door: Door) -> None:
    statuses = flood(door, door.stranger(), ENROL_PATH, 300)
    assert statuses["429"] >= 250 and set(statuses) <= {"502", "429"}, statuses


def test_a_flood_of_a_node_is_cut_to_200_requests_a_second(door: Door) -> None:
    statuses = flood(dataclasses.replace(door, port=door.empty), door.node(), FAST, 4000, KEY_LINE)
    assert statuses["502"] >= 2000 and statuses["429"] > 0 and set(statuses) == {"502", "429"}, statuses


def test_one_address_holds_64_requests_open_and_no_more(door: Door) -> None:
    text = f"POST {SLOW} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{KEY_LINE}\r\n".encode()
    context, connections = door.node(), list[ssl.SSLSocket]()
    try:
        for _ in range(70):
            plain = socket.create_connection(("localhost", door.port), timeout=HANG_GUARD)
            connections.append(context.wrap_socket(plain, server_hostname="localhost"))
            connections[-1].sendall(text)
        answers = answers_of(connections, 6)
        assert all(answer.startswith(b"HTTP/1.1 429") for answer in answers) and len(answers) == 6, answers
    finally:
        for connection in connections:
            connection.close()


def answers_of(connections: Sequence[ssl.SSLSocket], wanted: int) -> list[bytes]:
    """What came on those connections that were answered, once this many were."""
    found: dict[ssl.SSLSocket, bytes] = {}
    deadline = time.monotonic() + HANG_GUARD
    while len(found) < wanted:
        assert time.monotonic() < deadline, f"only {len(found)} connections were answered"
        ready, _, _ = select.select(connections, [], [], 1)
        found |= {connection: data for connection in ready if (data := peeked(connection))}
    return list(found.values())


def peeked(connection: ssl.SSLSocket) -> bytes:
    """What has come; nothing where only the session's own records have."""
    connection.settimeout(0.2)
    try:
        return connection.recv(MEGABYTE)
    except TimeoutError:
        return b""
