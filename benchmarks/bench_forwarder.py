"""Cost of a node's TLS forwarder: the same requests directly to a TLS server and through the forwarder, in alternation.

python benchmarks/bench_forwarder.py
"""

from __future__ import annotations

import http.client
import http.server
import statistics
import tempfile
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.flower.deploy.certificates import (
    certificate_request,
    load_authority,
    pem,
    pem_key,
    renew_server_certificate,
    sign_request,
)
from polyfed.flower.join.forwarder import Forwarder, client_context, server_context

SMALL, SMALL_REQUESTS = 1_000, 300
LARGE, LARGE_REQUESTS = 5 * 1024 * 1024, 20
"""Flower sends tensors in pieces of 5 MB."""
REPEATS = 3


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def seconds(port: int, folder: Path, size: int, count: int) -> float:
    """Return the median round-trip seconds on one connection."""
    connection = http.client.HTTPSConnection("localhost", port, context=client_context(folder / "ca.crt"))
    body, times = bytes(size), []
    for _ in range(count):
        begin = time.perf_counter()
        connection.request("POST", "/", body)
        connection.getresponse().read()
        times.append(time.perf_counter() - begin)
    connection.close()
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        authority = load_authority(folder, "bench")
        renew_server_certificate(folder, authority, [])
        key = ec.generate_private_key(ec.SECP384R1())
        (folder / "node.key").write_bytes(pem_key(key))
        (folder / "node.crt").write_bytes(pem(sign_request(authority, certificate_request(key, "x"), "node")))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
        context = server_context(folder / "server.crt", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        onward = client_context(folder / "ca.crt", folder / "node.crt", folder / "node.key")
        direct = int(server.server_address[1])
        through = Forwarder(context, lambda: onward, "localhost", direct, lambda account: None).start()
        for name, size, count in (("1 kB", SMALL, SMALL_REQUESTS), ("5 MB", LARGE, LARGE_REQUESTS)):
            pairs = [(seconds(direct, folder, size, count), seconds(through, folder, size, count)) for _ in range(REPEATS)]
            straight, forwarded = (min(values) for values in zip(*pairs, strict=True))
            print(f"{name} there and back: {1000 * straight:.2f} ms straight, {1000 * forwarded:.2f} ms through the forwarder")


if __name__ == "__main__":
    main()
