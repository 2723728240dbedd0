"""Servers and nodes that are killed, refused by a node's own rules, or sent code; each with real processes."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers import namespaces
from helpers.deployed import DATA, DOMAINS, LONG, Deployed, on_loopback
from helpers.flower_harness import end
from helpers.flower_runs import digest_in, in_process
from helpers.processes import gone
from polyfed.flower.app import write_app
from polyfed.flower.deploy.certificates import SERVER_CERTIFICATE, read_certificate
from polyfed.flower.deploy.folders import NodeFolder, ServerFolder
from polyfed.flower.deploy.processes import free_port
from polyfed.flower.serve.serve import SERVER_APP
from polyfed.runs.folder.audit_log import lines_of, verify
from polyfed.settings import Settings

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx"),
]
MACHINES = ("server", "one", "two", "three")
NODES = [(f"node-{number}", machine, domain) for number, (machine, domain) in enumerate(zip(MACHINES[1:], DOMAINS, strict=True), 1)]


def settings(method: str, rounds: int = 2) -> Settings:
    return Settings(
        data=DATA, unseen=("post", "print"), rounds=rounds, batch_size=8, local_steps=2, checkpoint_every="1", method=method
    )


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Deployed]:
    with Deployed(tmp_path, on_loopback(MACHINES), free_port()) as deployed:
        yield deployed


def test_a_server_killed_in_mid_run_goes_on_when_it_is_started_again(here: Deployed) -> None:
    words = ["--set", "rounds=6"]
    server = here.serve("fedbn", 3, *words)
    for node, machine, domain in NODES:
        here.join(node, machine, domain, wait=False)
    server.wait_for("round 2 of 6", LONG)
    children = [int(text) for text in Path(f"/proc/{server.handle.pid}/task/{server.handle.pid}/children").read_text().split()]
    assert len(children) >= 3
    server.handle.kill()
    server.handle.wait()
    assert all(gone(child, 30) for child in children)
    again = here.serve("fedbn", 3, *words)
    assert again.wait(LONG) == 0, again.log
    assert "Resuming the run" in again.log
    assert digest_in(again.log) == in_process(settings("fedbn", 6)).digest
    verify(here.server_folder / "audit.jsonl")


def test_a_node_refuses_by_name_at_both_ends_and_the_server_exits_with_1(here: Deployed) -> None:
    server = here.serve("fedbn", 2)
    here.join("node-1", "one", DOMAINS[0])
    node = here.join("node-2", "two", DOMAINS[1], wait=False)
    rules = here.folder / "node-2/node.toml"
    while not rules.exists():
        assert node.alive
    rules.write_text(rules.read_text().replace('methods = [ "*", ]', 'methods = ["fedavg"]'))
    assert '"fedavg"' in rules.read_text()
    assert server.wait(LONG) == 1, server.log
    sentence = "Refused by photo (its node.toml): methods does not list the method fedbn"
    assert sentence in server.log
    found = here.audited(here.folder / "node-2/audit.jsonl", {"event": "refused"})
    assert sentence in found["why"]


def test_a_node_cannot_take_the_name_that_another_enrolled_with(here: Deployed) -> None:
    server = here.serve("fedbn", 3, "--run-config", "min-nodes=2")
    honest = here.join("node-1", "one", "pen")
    refused = here.join("node-3", "three", "pen", wait=False)
    assert refused.wait(LONG) == 3 and "the client name pen belongs to node-1" in refused.log
    rules = here.folder / "node-3/node.toml"
    rules.write_text(rules.read_text().replace('domain = "pen"', 'domain = "street"'))
    liar = here.start("node-3-enrols", "three", ["join", str(here.kit("node-3")), "--data", DATA])
    liar.wait_for("Connected to", LONG)
    end(liar)
    rules.write_text(rules.read_text().replace('client = ""', 'client = "pen"'))
    assert "node-3: enrolled as street" in here.polyfed("nodes", "list")
    here.start("node-3-lies", "three", ["join", "--folder", "node-3"]).wait_for("Connected to", LONG)
    assert honest.alive
    here.join("node-2", "two", "photo")
    assert server.wait(LONG) == 0, server.log
    assert "Node node-3 cannot take part: It reports the client name pen, which belongs to node node-1." in server.log
    without = dataclasses.replace(settings("fedbn"), unseen=("street", "post", "print"))
    assert digest_in(server.log) == in_process(without).digest


def test_a_node_stops_at_the_limit_of_its_own_privacy_account(here: Deployed) -> None:
    pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")
    server = here.serve('fedwon + dp_sgd(epsilon=4.0, noise=\\"system\\")', 2, "--set", "rounds=2")
    here.join("node-1", "one", DOMAINS[0])
    node = here.join("node-2", "two", DOMAINS[1], wait=False)
    rules = here.folder / "node-2/node.toml"
    while not rules.exists():
        assert node.alive
    text = rules.read_text().replace("dp_required = false", "dp_required = true")
    rules.write_text(text.replace("max_total_epsilon = 10.0", "max_total_epsilon = 3.5"))
    assert server.wait(LONG) == 0, server.log
    sentence = "Client photo does not take part in round 2: over all runs it has spent"
    assert sentence in server.log and "max_total_epsilon" in server.log
    assert sentence in here.audited(here.folder / "node-2/audit.jsonl", {"event": "refused"})["why"]
    account = here.folder / "node-2/privacy.jsonl"
    assert verify(account).lines == 1 and account.stat().st_mode & 0o777 == 0o600
    assert verify(here.folder / "node-1/privacy.jsonl").lines == 2


def test_errors_reach_the_server_without_paths_and_file_names(here: Deployed) -> None:
    server = here.serve("fedbn", 2)
    here.join("node-1", "one", DOMAINS[0])
    place = here.folder / "ward seven/patients.csv"
    here.start("node-2", "two", ["join", str(here.kit("node-2")), "--data", str(place), "--domain", DOMAINS[1]])
    assert server.wait(LONG) == 1, server.log
    assert "1 of 2 nodes can take part" in server.log and "(omitted: see the node's log)" in server.log
    known = [path for path in here.server_folder.rglob("*") if path.is_file()]
    for secret in (b"ward seven", b"patients"):
        assert secret.decode() not in server.log
        assert not [path for path in known if secret in path.read_bytes()]
    node_logs = [path.read_bytes() for path in (here.folder / "node-2").rglob("*.log")]
    assert any(b"patients.csv" in text for text in node_logs), "the node itself is told"


HOSTILE = {
    "imports": (Settings(model="os:getcwd"), "the model os:getcwd would be imported"),
    "per_sample": (Settings(method="elcfs"), "data_derived_uploads is aggregate"),
    "rounds": (Settings(rounds=5000), "the run has 5000 rounds, but max_rounds is 1000"),
    "weights": (Settings(init="/etc/passwd"), "the run starts from a weights file"),
    "single_samples": (Settings(batch_size=1, local_steps=1), "clients train on 1 examples per round, but min_samples is 8"),
}
ASK = """
import sys, time
from pathlib import Path
from polyfed.flower.serve.control import Control
from polyfed.flower.deploy.folders import ServerFolder
folder = ServerFolder(Path(sys.argv[1]))
control = Control(int(sys.argv[2]), folder.link_certificates / "ca.crt", folder.control_secret)
for app in sys.argv[3:]:
    run = control.start(Path(app), {"min-nodes": 2, "wait": 600.0})
    while control.ended(run) is None:
        time.sleep(0.5)
"""


def test_what_a_hostile_server_asks_is_refused_by_name_at_the_nodes(here: Deployed) -> None:
    here.serve("fedbn", 3)
    for node, machine, domain in NODES[:2]:
        here.join(node, machine, domain)
    apps = []
    for name, (hostile, _) in HOSTILE.items():
        apps.append(here.folder / f"hostile-{name}")
        write_app(apps[-1], dataclasses.replace(hostile, data=DATA), name, SERVER_APP)
    conf = (here.server_folder / "front/nginx.conf").read_text()
    port = conf.split("upstream superlink {")[1].split("127.0.0.1:")[1].split(";")[0]
    here.python_on("server", ASK, str(here.server_folder), port, *map(str, apps))
    for node in ("node-1", "node-2"):
        for _, sentence in HOSTILE.values():
            here.audited(
                here.folder / node / "audit.jsonl",
                lambda line, sentence=sentence: line["event"] == "refused" and sentence in line["why"],
            )
        assert not [line for line in lines_of(here.folder / node / "audit.jsonl") if line.get("what", "").startswith("train")]


def test_a_node_that_is_killed_comes_back_by_itself_when_it_is_started_again(here: Deployed) -> None:
    server = here.serve("fedbn", 2)
    first = here.join("node-1", "one", DOMAINS[0])
    end(first)
    old = here.folder / "node-1/state/an-old-run/client.safetensors"
    old.parent.mkdir()
    old.touch()
    for path in (old, old.parent):
        os.utime(path, (0, 0))
    again = here.start("node-1-again", "one", ["join", "--folder", "node-1"])
    again.wait_for("Connected to", LONG)
    assert not old.parent.exists()
    here.audited(here.folder / "node-1/audit.jsonl", {"event": "state removed", "run": "an-old-run", "unused_days": 30})
    here.join("node-2", "two", DOMAINS[1])
    assert server.wait(LONG) == 0, server.log


AN_ODD_DAY = """
import sys, time
import polyfed.flower.join.enrol as enrol_client
from polyfed.__main__ import main
usual, due = time.time, iter([True])
time.time = lambda: usual() + 12.0
enrol_client.expires_soon = lambda certificate: next(due, False)
sys.argv[0] = "polyfed"
main()
"""
"""The command polyfed, twelve seconds ahead, with a certificate that ends soon."""


def test_a_node_renews_its_certificate_says_that_its_clock_is_off_and_trains(here: Deployed) -> None:
    server = here.serve("fedbn", 2)
    here.join("node-1", "one", DOMAINS[0])
    words = ["join", str(here.kit("node-2")), "--data", DATA, "--domain", DOMAINS[1]]
    node = here.start("node-2", "two", words, [sys.executable, "-c", AN_ODD_DAY])
    node.wait_for("The certificate was renewed.", LONG)
    assert "This machine's clock is 12 s ahead of the server's." in node.log
    assert server.wait(LONG) == 0, server.log
    for event in ("certificate renewed", "clock is off"):
        here.audited(here.folder / "node-2/audit.jsonl", {"event": event})
    assert "node-2: enrolled" in here.polyfed("nodes", "list")


A_SHORT_HOUR = """
import sys
from pathlib import Path
from polyfed.flower.deploy import certificates
from polyfed.flower.serve import serve
from polyfed.__main__ import main
serve.HOUR, ask = 1.0, Path("ends-soon")
certificates.expires_soon = lambda certificate: ask.exists() and not ask.unlink()
sys.argv[0] = "polyfed"
main()
"""
"""The command polyfed, whose hours last a second, and whose certificate ends soon when there is a file of that name."""


def test_a_server_that_runs_renews_its_certificate_and_nodes_get_in(here: Deployed) -> None:
    here.serve("fedbn", 2, program=[sys.executable, "-c", A_SHORT_HOUR])
    before = ssl.get_server_certificate((here.host, here.port))
    (here.folder / "ends-soon").touch()
    end_time = time.monotonic() + LONG
    while (after := ssl.get_server_certificate((here.host, here.port))) == before:
        assert time.monotonic() < end_time
        time.sleep(1.0)
    assert after.strip() == (here.server_folder / "certificates" / SERVER_CERTIFICATE).read_text().strip()
    here.join("node-1", "one", DOMAINS[0])


def test_certificates_that_processes_read_once_outlast_them(here: Deployed) -> None:
    here.serve("fedbn", 2)
    here.join("node-1", "one", DOMAINS[0])
    in_five_years = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=5 * 365)
    for folder in (ServerFolder(here.server_folder).link_certificates, NodeFolder(here.folder / "node-1").local_certificates):
        assert read_certificate(folder / SERVER_CERTIFICATE).not_valid_after_utc > in_five_years


@pytest.mark.skipif(not namespaces.usable(), reason="needs ip netns, and root")
def test_hfedf_in_three_namespaces_trains_to_the_digest_of_the_run_in_process(tmp_path: Path) -> None:
    with namespaces.machines(MACHINES) as machines, Deployed(tmp_path, machines) as deployed:
        server = deployed.serve("hfedf", 3)
        for node, machine, domain in NODES:
            deployed.join(node, machine, domain, wait=False)
        assert server.wait(LONG) == 0, server.log
        assert digest_in(server.log) == in_process(settings("hfedf")).digest
