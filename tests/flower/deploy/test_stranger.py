"""A stranger at a real deployment: server, nodes and stranger each in a network namespace of their own. Nothing runs, nothing is read.

One server and its nodes for the whole file. The tests follow one another: first strangers, then nodes join, then the run is trained.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers import namespaces
from helpers.deployed import DATA, DOMAINS, LONG, Deployed
from helpers.flower_runs import digest_in, in_process
from polyfed.runs.folder.audit_log import lines_of, verify
from polyfed.settings import Settings

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx"),
    pytest.mark.skipif(not namespaces.usable(), reason="needs ip netns, and root"),
]

REQUEST = textwrap.dedent("""
    import http.client, json, ssl, sys
    host, port, path, ca, certificate, key, headers, body = sys.argv[1:9]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca)
    if certificate:
        context.load_cert_chain(certificate, key)
    connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)
    try:
        connection.request("POST", path, body.encode(), json.loads(headers))
        print(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        print(type(error).__name__)
""")
"""Prints the status of an answer, or the name of the error where there is none."""

HOSTILE_CLIENT = """
from pathlib import Path
Path("MARK").write_text("hostile code ran")
from flwr.clientapp import ClientApp
from flwr.app import Message, RecordDict
app = ClientApp()
@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""
HOSTILE_SERVER = """
import time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in nodes], timeout=60)
    for reply in replies:
        print("REPLY", reply.has_error(), reply.error.reason if reply.has_error() else "", flush=True)
"""
HOSTILE_PROJECT = """
[project]
name = "hostile"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "hostile.server_app:app"
clientapp = "hostile.client_app:app"
[tool.flwr.app.config]
"""
START = textwrap.dedent("""
    import json, sys, time
    from pathlib import Path
    from polyfed.flower.serve.control import Control
    from polyfed.flower.deploy.folders import ServerFolder
    folder = ServerFolder(Path(sys.argv[1]))
    control = Control(int(sys.argv[2]), folder.link_certificates / "ca.crt", folder.control_secret)
    run = control.start(Path(sys.argv[3]), {})
    while (ended := control.ended(run)) is None:
        time.sleep(0.5)
    for text in control.log_of(run):
        print(text)
    print(ended)
""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    with namespaces.machines(["server", "one", "two", "three", "stranger"]) as machines, Deployed(folder, machines) as deployed:
        deployed.serve("fedbn", 3)
        yield deployed


def request(
    site: Deployed, path: str, machine: str = "stranger", cert: Path | None = None, key: str = "", body: str = "", port: int = 0
) -> str:
    """What a request gets: a status, or the name of an error."""
    pair = ["", ""] if cert is None else [str(cert / "keys/node.crt"), str(cert / "keys/node.key")]
    headers = json.dumps({"flwr-public-key": key} if key else {})
    ca = str(site.server_folder / "certificates/ca.crt")
    return site.python_on(machine, REQUEST, site.host, str(port or site.port), path, ca, *pair, headers, body).strip()


def flower_key(site: Deployed, node: str) -> str:
    """The header by which Flower knows a node."""
    import base64

    nodes = json.loads((site.server_folder / "nodes.json").read_text())
    return base64.b64encode(nodes[node]["key"].encode()).decode()


def link_port(site: Deployed) -> int:
    text = (site.server_folder / "front/nginx.conf").read_text()
    return int(text.split("upstream superlink {")[1].split("127.0.0.1:")[1].split(";")[0])


def test_control_and_runtime_answer_a_stranger_with_nothing(site: Deployed) -> None:
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/control/list-nodes",
        "/v1/runtime/acquire-task",
        "/v1/runtime/pull-object",
        "/v1/fleet/register-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/list-nodes",
        "//v1/control/list-nodes",
        "/docs",
        "/openapi.json",
        "/health",
        "/",
    ):
        assert request(site, path) == "RemoteDisconnected"
        site.audited(site.server_folder / "audit.jsonl", {"event": "refused at the front", "path": path, "address": "10.77.0.5"})


def test_fleet_refuses_a_stranger_who_has_only_the_authoritys_certificate(site: Deployed) -> None:
    assert request(site, "/v1/fleet/activate-node") == "403"
    found = {"event": "refused at the front", "path": "/v1/fleet/activate-node", "certificate": "NONE"}
    site.audited(site.server_folder / "audit.jsonl", found)


def test_flowers_own_commands_of_a_stranger_get_nowhere(site: Deployed) -> None:
    """What ran foreign code on server and nodes before there was a front: flwr, with the authority's certificate and nothing else."""
    home = site.folder / "stranger-home"
    home.mkdir()
    ca = site.server_folder / "certificates/ca.crt"
    config = f'[superlink.them]\naddress = "{site.host}:{site.port}"\nroot-certificates = "{ca}"\n'
    (home / "config.toml").write_text(config)
    hostile = hostile_app(site.folder / "stranger-app", site.folder / "stranger-mark")
    for words in (["list", "them"], ["run", str(hostile), "them"]):
        done = site.run_on("stranger", ["env", f"FLWR_HOME={home}", "FLWR_TELEMETRY_ENABLED=0", "flwr", *words])
        assert done.returncode != 0, done.stdout
    assert not (site.folder / "stranger-mark").exists()


def test_the_superlinks_port_is_not_reached_from_another_machine(site: Deployed) -> None:
    assert request(site, "/v1/control/list-nodes", port=link_port(site)) == "ConnectionRefusedError"


def test_the_superlinks_port_refuses_other_accounts_of_the_servers_machine(site: Deployed) -> None:
    """From the server's own machine the port is reached; without the secrets it says nothing, and the audit log has it."""
    code = textwrap.dedent("""
        import http.client, ssl, sys
        context = ssl._create_unverified_context()
        for path in sys.argv[2:]:
            connection = http.client.HTTPSConnection("127.0.0.1", int(sys.argv[1]), timeout=20, context=context)
            connection.request("POST", path, b"")
            print(connection.getresponse().status)
    """)
    paths = ["/v1/control/list-nodes", "/v1/control/start-run", "/v1/fleet/activate-node", "/docs", "/health"]
    assert site.python_on("server", code, str(link_port(site)), *paths).split() == ["404"] * len(paths)
    for path in paths:
        site.audited(site.server_folder / "audit.jsonl", {"event": "request past the front refused", "path": path})
    # Runtime has a lock of its own: Flower's secret, and a token for each task.
    statuses = site.python_on("server", code, str(link_port(site)), "/v1/runtime/acquire-task", "/v1/runtime/pull-object").split()
    assert all(400 <= int(status) < 500 for status in statuses), statuses


def test_enrolment_needs_an_unused_token(site: Deployed) -> None:
    assert request(site, "/polyfed/enrol", body=json.dumps({"token": "guessed", "request": "", "key": ""})) == "403"
    assert request(site, "/polyfed/enrol", body="not json") == "403"
    assert request(site, "/polyfed/enrol", body="x" * 20_000) == "413"
    site.audited(site.server_folder / "audit.jsonl", {"event": "enrolment refused", "address": "10.77.0.5"})


def test_another_nodes_certificate_a_used_kit_and_a_revoked_certificate_are_refused(site: Deployed) -> None:
    site.join("node-1", "one", DOMAINS[0])
    second = site.join("node-2", "two", DOMAINS[1])
    audit, path = site.server_folder / "audit.jsonl", "/v1/fleet/activate-node"
    # Each with its own key passes the front; Flower then asks for a signature.
    assert request(site, path, cert=site.folder / "node-1", key=flower_key(site, "node-1")) not in ("403", "RemoteDisconnected")
    for certificate, key in (("node-1", "node-2"), ("node-2", "node-1")):
        assert request(site, path, cert=site.folder / certificate, key=flower_key(site, key)) == "403"
        site.audited(audit, {"event": "refused at the front", "path": path, "subject": f"CN={certificate}"})
    assert request(site, path, cert=site.folder / "node-1", key="c3RyYW5nZXI=") == "403"
    again = site.start(
        "thief", "stranger", ["join", str(site.kit("node-1")), "--data", DATA, "--domain", "pen", "--folder", "thief"]
    )
    assert again.wait(LONG) == 3
    assert "was used before" in again.log
    kept = site.folder / "revoked"
    shutil.copytree(site.folder / "node-2/keys", kept / "keys")
    old_key = flower_key(site, "node-2")
    site.polyfed("nodes", "revoke", "node-2")
    assert second.wait(LONG) == 3, second.log
    assert "does not belong to an admitted node" in second.log
    assert request(site, path, cert=kept, key=old_key) == "403"
    site.audited(audit, {"event": "revoked", "node": "node-2"})
    site.polyfed("nodes", "renew", "node-2")
    site.join("node-2", "two", DOMAINS[1])
    assert request(site, path, cert=kept, key=old_key) == "403"
    assert "node-2: enrolled" in site.polyfed("nodes", "list")


def hostile_app(folder: Path, mark: Path) -> Path:
    (folder / "hostile").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(HOSTILE_PROJECT)
    (folder / "hostile/__init__.py").write_text("")
    (folder / "hostile/client_app.py").write_text(HOSTILE_CLIENT.replace("MARK", str(mark)))
    (folder / "hostile/server_app.py").write_text(HOSTILE_SERVER)
    return folder


def test_a_hostile_app_of_the_server_itself_runs_nothing_at_the_nodes(site: Deployed) -> None:
    """Even with the server's own secrets: nodes refuse the bundle, say so in their audit logs, and unpack nothing of it."""
    mark = site.folder / "hostile-mark"
    app = hostile_app(site.folder / "hostile-app", mark)
    site.python_on("server", START, str(site.server_folder), str(link_port(site)), str(app))
    for node in ("node-1", "node-2"):
        found = site.audited(site.folder / node / "audit.jsonl", {"event": "app bundle refused"})
        assert "hostile/client_app.py" in found["why"]
        assert not list((site.folder / node).rglob("client_app.py"))
    assert not mark.exists()


def test_the_nodes_own_port_needs_a_secret(site: Deployed) -> None:
    """The Runtime of the SuperNode: on loopback, and no task without Flower's secret."""
    log = (site.folder / "node-1/logs/supernode.log").read_text()
    port = log.rsplit("http://127.0.0.1:", 1)[1].split()[0]
    code = textwrap.dedent("""
        import sys
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        own = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        client = RuntimeHttpClient.from_server_address(sys.argv[1], insecure=True, root_certificates=None, interceptors=own)
        try:
            client.AcquireTask(AcquireTaskRequest())
            print("taken")
        except httpx.HTTPStatusError as error:
            print(error.response.status_code)
    """)
    assert site.python_on("one", code, f"127.0.0.1:{port}").strip() in ("401", "403")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_another_account_of_a_nodes_machine_reaches_neither_its_files_nor_its_sockets(site: Deployed) -> None:
    temporary = Path(tempfile.gettempdir())
    # Folders that pytest made are closed to others as well, which would prove nothing.
    for folder in (site.folder, *(parent for parent in site.folder.parents if temporary in parent.parents)):
        folder.chmod(0o755)
    node, short_paths = site.folder / "node-1", temporary / f"polyfed-{os.getuid()}"
    sockets = [*node.rglob("*.sock"), *short_paths.glob("*.sock")]
    hidden = [node / "node.toml", node / "audit.jsonl", *(node / "keys").iterdir(), *sockets]
    script = 'ls "$1"; shift; for path; do test -e "$path" && echo "reached $path"; done; true'
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", script, "sh"]
    done = site.run_on("one", [*nobody, str(site.folder), *map(str, hidden)])
    assert sockets and "node-1" in done.stdout.split() and "reached" not in done.stdout, done.stdout


def test_three_nodes_in_three_namespaces_train_to_the_digest_of_the_run_in_process(site: Deployed) -> None:
    """The last of this file: the run ends the server."""
    site.join("node-3", "three", DOMAINS[2])
    server = site.processes[0]
    assert server.wait(LONG) == 0, server.log
    assert "round 2 of 2" in server.log
    settings = Settings(
        data=DATA, unseen=("post", "print"), rounds=2, batch_size=8, local_steps=2, checkpoint_every="1", method="fedbn"
    )
    assert digest_in(server.log) == in_process(settings).digest
    verify(site.server_folder / "audit.jsonl")
    arrived = {line["content"] for line in lines_of(site.server_folder / "audit.jsonl") if line["event"] == "answered"}
    for node in ("node-1", "node-2", "node-3"):
        verify(site.folder / node / "audit.jsonl")
        left = [line["content"] for line in lines_of(site.folder / node / "audit.jsonl") if line["event"] == "answered"]
        assert left and set(left) <= arrived
    for folder in (site.server_folder, *(site.folder / node for node in ("node-1", "node-2", "node-3"))):
        open_to_others = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        assert not open_to_others and not folder.stat().st_mode & 0o077, open_to_others
