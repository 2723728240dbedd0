"""nginx's file, the enrolment service, the forwarder and the units."""

from __future__ import annotations

import http.client
import http.server
import json
import shutil
import ssl
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec

from helpers.paths import PACKAGE
from polyfed.errors import SettingError
from polyfed.flower.deploy.certificates import (
    certificate_request,
    load_authority,
    pem,
    pem_key,
    renew_server_certificate,
    sign_request,
)
from polyfed.flower.deploy.templates import FOLDER as TEMPLATES
from polyfed.flower.deploy.units import write_node_units, write_server_units
from polyfed.flower.join.enrol import MAX_AHEAD, MAX_BEHIND, clock_problem, server_time
from polyfed.flower.join.forwarder import Forwarder, account_of, client_context, server_context
from polyfed.flower.serve.enrolment import Enrolment, Service
from polyfed.flower.serve.front import ENROL_PATH, FLEET, MAX_LINES, SECRET_HEADER, Front, FrontLog
from polyfed.flower.serve.registry import ENROLLED, NodeRecord
from polyfed.runs.folder.audit_log import AuditLog, lines_of


def front(folder: Path) -> Front:
    certificates = folder / "certificates"
    certificates.mkdir(parents=True, exist_ok=True)
    renew_server_certificate(certificates, load_authority(certificates, "test"), [])
    return Front(folder / "front", "127.0.0.1", 18999, 1, 2, "secret", certificates, certificates / "ca.crt")


@pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx")
def test_nginx_takes_the_file_and_it_is_written_again_only_when_nodes_change(tmp_path: Path) -> None:
    made, node = front(tmp_path), NodeRecord("node-1", ENROLLED, serial="0ABC", key="a public key")
    assert made.write([node]) and not made.write([node])
    made.check()
    assert '"0ABC ' in made.file.read_text()
    node.state = "revoked"
    assert made.write([node]) and '"0ABC ' not in made.file.read_text()
    assert made.file.stat().st_mode & 0o077 == 0


def test_the_front_passes_what_a_registered_supernode_asks_for_and_no_more() -> None:
    from flwr.superlink.routers.fleet.router import router

    served = {route.path.rsplit("/", 1)[1] for route in router.routes}  # type: ignore[attr-defined]
    assert served - set(FLEET) == {"register-node", "unregister-node"}
    assert set(FLEET) <= served


def test_a_folder_that_nginx_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nginx cannot use the folder"):
        Front(tmp_path / 'a"b', "127.0.0.1", 1, 1, 2, "secret", tmp_path, tmp_path)


def test_enrolment_answers_only_the_front(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    service = Service(Enrolment(tmp_path, load_authority(tmp_path, "test"), audit, lambda: None), "secret")
    port = service.start()
    try:
        for headers, path, status in (
            ({}, ENROL_PATH, 404),
            ({SECRET_HEADER: "no"}, ENROL_PATH, 404),
            ({SECRET_HEADER: "secret"}, "/", 404),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", path, "{}", headers)
            assert connection.getresponse().status == status
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", ENROL_PATH, "{}", {SECRET_HEADER: "secret"})
        assert connection.getresponse().status == 403
    finally:
        service.shutdown()
        service.server_close()
    assert [line["event"] for line in lines_of(audit.path)] == ["enrolment past the front refused"] * 3 + ["enrolment refused"]


def test_refusals_of_the_front_are_audited_and_a_flood_does_not_fill_the_disk(tmp_path: Path) -> None:
    access, audit = tmp_path / "access.log", AuditLog(tmp_path / "audit.jsonl")
    lines = [{"address": "10.0.0.9", "path": f"/{number}", "status": 444, "node": ""} for number in range(500)]
    lines += [{"address": "10.0.0.9", "path": "/same", "status": 444, "node": ""}] * 70
    lines += [{"address": "10.0.0.1", "path": "/v1/fleet/x", "status": 200, "node": "node-1", "time": "now", "serial": "1"}]
    access.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"unfinished')
    assert set(FrontLog(access, audit).poll()) == {"node-1"}
    found = list(lines_of(audit.path))
    assert len(found) == MAX_LINES + 1 and sum(line["count"] for line in found) == 570
    assert found[0]["path"] == "/same" and found[0]["count"] == 70
    assert FrontLog(access, audit).poll() == {} and len(list(lines_of(audit.path))) == MAX_LINES + 1


def test_the_forwarder_shows_the_nodes_certificate_and_passes_bytes_both_ways(tmp_path: Path) -> None:
    authority = load_authority(tmp_path, "test")
    renew_server_certificate(tmp_path, authority, [])
    key = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "node.key").write_bytes(pem_key(key))
    (tmp_path / "node.crt").write_bytes(pem(sign_request(authority, certificate_request(key, "x"), "node-1")))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            subject = dict(pair[0] for pair in self.connection.getpeercert()["subject"])  # type: ignore[attr-defined]
            content = subject["commonName"].encode() + body[::-1]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = server_context(tmp_path / "server.crt", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tmp_path / "ca.crt")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    onward = client_context(tmp_path / "ca.crt", tmp_path / "node.crt", tmp_path / "node.key")
    listening = server_context(tmp_path / "server.crt", tmp_path / "server.key")
    forwarder = Forwarder(listening, lambda: onward, "localhost", server.server_address[1], lambda account: None)
    body = bytes(range(256)) * 8192
    connection = http.client.HTTPSConnection(
        "localhost", forwarder.start(), timeout=60, context=client_context(tmp_path / "ca.crt")
    )
    try:
        for _ in range(2):
            connection.request("POST", "/", body)
            assert connection.getresponse().read() == b"node-1" + body[::-1]
    finally:
        connection.close()
        server.shutdown()
        server.server_close()


def test_the_account_at_the_other_end_of_a_connection_is_known() -> None:
    import os
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        assert account_of(other.getsockname()[1], listener.getsockname()[1]) == os.getuid()
        assert account_of(1, 2) is None


def test_a_clock_that_flower_would_refuse_is_said() -> None:
    for ahead, word in ((MAX_AHEAD + 1, "ahead of"), (-MAX_BEHIND - 1, "behind")):
        from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

        assert (MAX_AHEAD, MAX_BEHIND) == (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE)
        assert word in clock_problem(ahead)
        assert clock_problem(0.6) == clock_problem(-60.0) == ""
        assert server_time("Tue, 17 Nov 2026 03:00:00 GMT", 0.0) % 60 == 0.5
        assert server_time("nonsense", 7.0) == 7.0


def test_units_start_the_same_command_and_overwrite_nothing(tmp_path: Path) -> None:
    words = ["serve", "demo", "--host", "fl.example.org", "--set", 'method="fedbn + agc(clip=1.0)"']
    files = write_server_units(tmp_path / "units", words, tmp_path / "polyfed-server", 8443)
    unit = files[0].read_text()
    assert "polyfed serve demo --host fl.example.org" in unit and "RestartPreventExitStatus=2 3" in unit
    assert "8443:8443" in files[1].read_text()
    with pytest.raises(SettingError, match="nothing is overwritten"):
        write_server_units(tmp_path / "units", words, tmp_path / "polyfed-server", 8443)
    node = write_node_units(tmp_path / "node", ["join", "node-1.kit"], tmp_path / "node-1", "/srv/images")
    assert "/srv/images:/srv/images:ro" in node[1].read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for file in unit_files(tmp_path, ".service"):
        done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
        odd = [line for line in done.stderr.splitlines() if file.name in line and "is not executable" not in line]
        assert not odd, odd


def test_the_compose_files_are_yaml_with_what_the_command_needs(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="reads compose files")
    server, node = (yaml.safe_load(file.read_text())["services"] for file in unit_files(tmp_path, "compose.yaml"))
    assert server["serve"]["command"] == ["serve", "demo", "--set", 'method="fedbn"', "--data", "/a b/$$x"]
    assert server["serve"]["ports"] == ["8443:8443"] and server["serve"]["cap_drop"] == ["ALL"]
    assert node["polyfed-node-1"]["volumes"][1] == "/srv/images:/srv/images:ro" and "ports" not in node["polyfed-node-1"]
    # Every key is one of a service in the compose specification.
    known = {"image", "build", "init", "restart", "read_only", "tmpfs", "cap_drop", "security_opt", "user", "working_dir"}
    assert {key for service in (*server.values(), *node.values()) for key in service} <= known | {"command", "volumes", "ports"}


def unit_files(folder: Path, ending: str) -> list[Path]:
    """The files of a server and of a node with this ending."""
    words = ["serve", "demo", "--set", 'method="fedbn"', "--data", "/a b/$x"]
    files = write_server_units(folder / "server", words, folder / "polyfed-server", 8443)
    files += write_node_units(folder / "node", ["join", "node-1.kit"], folder / "node-1", "/srv/images")
    return [file for file in files if file.name.endswith(ending)]


def test_the_wheel_takes_all_files_of_the_package_and_git_ignores_no_template() -> None:
    root = PACKAGE.parents[1]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/polyfed"]}, "with include or exclude, look whether templates are still packed"
    templates = [file for file in TEMPLATES.iterdir() if file.suffix not in (".py", "")] + [TEMPLATES / "Dockerfile"]
    assert {file.name for file in templates} == {"nginx.conf", "unit.service", "compose.yaml", "Dockerfile"}
    ignored = subprocess.run(["git", "check-ignore", *map(str, templates)], cwd=root, capture_output=True, text=True, check=False)
    assert ignored.returncode == 1, ignored.stdout or ignored.stderr
