"""A hostile server at real nodes, each refusal with real processes: bundles, settings and questions past what ``node.toml`` allows.

One server and its nodes for the whole file: ``helpers/hostile_server.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import math
import shutil
import signal
import sqlite3
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from helpers.app_bundles import OTHER_BUNDLES, bundle, project
from helpers.deployed import DATA, LONG
from helpers.flower_harness import PROGRAMS
from helpers.hostile_app import HERE
from helpers.hostile_server import HostileRun, HostileServer, honest_ask, hostile_server
from helpers.policy_cases import CASES
from polyfed.core.rounds import Payload
from polyfed.flower.join.guarded_executor import uniform_counts
from polyfed.flower.join.policy import Policy
from polyfed.flower.serve.front import MAX_LINES
from polyfed.flower.wire.codec import Encoder, payload_of
from polyfed.flower.wire.descriptions import own_versions
from polyfed.flower.wire.message import DESCRIBE, WireMessage
from polyfed.methods.dp_fedavg import CLIP
from polyfed.runs.folder.audit_log import lines_of, verify
from polyfed.settings import Settings

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx"),
    # Flower's own packing uses a name of pathspec that newer releases of it will take away.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
NODE = "node-1"
AT_CLIENTS = 'dp_fedavg(noise="system", noise_at="client", adaptive=False, clip=0.001)'
SMALL = Settings(data=DATA, unseen=("post", "print"), rounds=2, batch_size=8, local_steps=2)
WHO_ARE_YOU = {"what": DESCRIBE, "versions": own_versions()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileServer]:
    with hostile_server(tmp_path_factory.mktemp("hostile")) as made:
        made.deployed.join(NODE, "node", "pen")
        yield made


def give_nodes(server: HostileServer, run: HostileRun, bundle: bytes, called: str = "") -> None:
    """Change the database of the SuperLink: nodes that ask for the app of this run get another bundle than its ServerApp got."""
    own, number = called or hashlib.sha256(bundle).hexdigest(), int.from_bytes(run.number.to_bytes(8), signed=True)
    with contextlib.closing(sqlite3.connect(server.folder.database, timeout=60.0)) as database, database:
        (table,) = database.execute("SELECT verifications FROM fab LIMIT 1").fetchone()
        database.execute("INSERT OR IGNORE INTO fab (fab_hash, content, verifications) VALUES (?, ?, ?)", (own, bundle, table))
        changed = database.execute("UPDATE run SET fab_hash = ? WHERE run_id = ?", (own, number)).rowcount
        assert changed == 1


def test_other_bundles_are_refused_by_name_and_nothing_of_them_is_unpacked(server: HostileServer) -> None:
    folder, before = server.deployed.folder / NODE, described(server)
    for name, (content, sentence) in OTHER_BUNDLES.items():
        with server.run(SMALL) as run:
            give_nodes(server, run, content)
            assert "Refused" in run.refused(NODE, WHO_ARE_YOU, "query"), name
        assert sentence in server.audited(NODE, "app bundle refused")[-1], name
    assert len(server.audited(NODE, "app bundle refused")) == len(OTHER_BUNDLES)
    assert not [path for path in folder.rglob("*") if path.suffix == ".py" or path.name in ("pyproject.toml", "data.bin")]
    assert described(server) == before


def described(server: HostileServer) -> dict[str, Any]:
    with server.run(SMALL) as run:
        answer = run.ask(NODE, WHO_ARE_YOU, "query")
    assert answer.control["ok"] and answer.control["description"]["client"] == "pen"
    return dict(answer.control)


def test_a_node_comes_back_after_a_bundle_that_is_not_the_one_it_asked_for(server: HostileServer) -> None:
    with server.run(SMALL) as run:
        give_nodes(server, run, bundle(**project()), "f" * 64)
        run.refused(NODE, WHO_ARE_YOU, "query")
    node, end = server.deployed.processes[-1], time.monotonic() + LONG
    node.wait_for("The connection ended", LONG)
    while node.log.count("Connected to") < 2:
        assert node.alive and time.monotonic() < end
        time.sleep(0.2)
    described(server)


def allow(server: HostileServer, node: str = NODE, **rules: Any) -> None:
    """Write a node's own rules: the usual ones with these changes."""
    file = server.deployed.folder / node / "node.toml"
    now = Policy.read(file)
    Policy(data=now.data, domain=now.domain, client=now.client, **rules).write(file)


def question(what: str = "train", extras: Mapping[str, Any] | None = None, **control: Any) -> WireMessage:
    return Encoder().encode(Payload({}, dict(extras or {})), {"what": what, **control})


def test_what_node_toml_does_not_allow_is_refused_by_name_at_both_ends(server: HostileServer) -> None:
    by_settings: dict[Settings, list[Any]] = {}
    for rules, settings, asked, sentence in CASES:
        by_settings.setdefault(Settings(**settings), []).append((rules, asked, sentence))
    for settings, cases in by_settings.items():
        with server.run(settings) as run:
            for rules, asked, sentence in cases:
                allow(server, **rules)
                said = run.refused(NODE, question(**asked))
                assert sentence in said, (settings.method, said)
                assert said == server.audited(NODE)[-1]
    assert not left_at(server)


def left_at(server: HostileServer, node: str = NODE) -> list[Path]:
    """What trainings left at a node."""
    folder = server.deployed.folder / node
    return [*folder.glob("privacy.jsonl"), *folder.rglob("*.safetensors")]


def test_numbers_of_examples_by_class_are_told_where_node_toml_says_so(server: HostileServer) -> None:
    allow(server)
    with server.run(SMALL) as run:
        told = run.ask(NODE, WHO_ARE_YOU, "query").control["description"]["class_counts"]
        allow(server, class_counts=False)
        hidden = run.ask(NODE, WHO_ARE_YOU, "query").control["description"]["class_counts"]
    assert hidden == uniform_counts(told) and hidden != told


def with_entry(message: WireMessage, ending: str, value: float) -> WireMessage:
    sent = payload_of(message)
    name = next(name for name in sent.entries if name.endswith(ending))
    return Encoder().encode(
        Payload({**sent.entries, name: torch.full_like(sent.entries[name], value)}, sent.extras), message.control
    )


def with_extra(message: WireMessage, name: str, value: object) -> WireMessage:
    sent = payload_of(message)
    assert name in sent.extras
    return Encoder().encode(Payload(sent.entries, {**sent.extras, name: value}), message.control)


def test_what_would_take_the_clip_away_is_refused_and_not_charged(server: HostileServer, tmp_path: Path) -> None:
    allow(server)
    settings = dataclasses.replace(SMALL, method=AT_CLIENTS)
    message, account = honest_ask(settings, tmp_path), server.deployed.folder / NODE / "privacy.jsonl"
    with server.run(settings) as run:
        for value in (math.nan, math.inf, 1e20):
            assert "running_mean has values" in run.refused(NODE, with_entry(message, "running_mean", value))
        for clip in (math.nan, math.inf, 0.0, -1.0, 1e-7, 1e7):
            said = run.refused(NODE, with_extra(message, CLIP, clip))
            assert "of what the server sent, clip must be between 1e-06 and 1e+06" in said
            assert said == server.audited(NODE)[-1]
        assert not account.exists(), "nothing was trained, so nothing is charged"
        for times in (1, 2):
            assert run.ask(NODE, message).control["ok"]
            assert verify(account).lines == times, "the same round again is charged again"


def test_a_partition_leaves_a_node_neither_few_examples_nor_another_account(server: HostileServer, tmp_path: Path) -> None:
    allow(server)
    few = dataclasses.replace(SMALL, partition="domain_parts(parts=1, out_of=5)", local_steps=None)
    with server.run(few) as run:
        for asked in (WireMessage(WHO_ARE_YOU), question()):
            said = run.refused(NODE, asked)
            assert "examples, but min_samples is 8. Use a partition that gives it more" in said
            assert said == server.audited(NODE)[-1]
    account = server.deployed.folder / NODE / "privacy.jsonl"
    before = verify(account).lines if account.exists() else 0
    allow(server, min_samples=1)
    for partition in ("domain", "domain_parts(parts=1, out_of=2)"):
        settings = dataclasses.replace(SMALL, method=AT_CLIENTS, partition=partition)
        with server.run(settings) as run:
            assert run.ask(NODE, honest_ask(settings, tmp_path / partition)).control["ok"]
    assert verify(account).lines == before + 2
    assert len({line["client"] for line in lines_of(account)}) == 2


OWN_CODE = """
from pathlib import Path
import polyfed
from torch import nn
Path("MARK").touch()


@polyfed.register
def quiet_one() -> polyfed.Method:
    return polyfed.Method("quiet_one", standalone=False)


def build(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
"""


def test_own_methods_and_models_run_at_a_node_that_lists_their_hash_and_at_no_other(server: HostileServer, tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "quiet.py"
    file.write_text(OWN_CODE.replace("MARK", str(mark)))
    own = hashlib.sha256(file.read_bytes()).hexdigest()
    method = dataclasses.replace(SMALL, load=(str(file),), method="fedavg + quiet_one")
    model = dataclasses.replace(SMALL, load=(str(file),), model="quiet:build")
    for settings in (method, model):
        for listed in ((), ("f" * 64,)):
            allow(server, code=listed)
            with server.run(settings) as run:
                run.refused(NODE, WHO_ARE_YOU, "query")
            assert "brings code that this node does not list: quiet.py" in server.audited(NODE, "app bundle refused")[-1]
    assert not mark.exists()
    allow(server, code=(own,))
    with server.run(model) as run:
        said = run.refused(NODE, WHO_ARE_YOU, "query")
        assert "the model quiet:build would be imported, but import_paths does not list it" in said == server.audited(NODE)[-1]
        allow(server, code=(own,), import_paths=("quiet:build",))
        assert run.ask(NODE, WHO_ARE_YOU, "query").control["ok"] and mark.exists()
    mark.unlink()
    with server.run(method) as run:
        assert run.ask(NODE, WHO_ARE_YOU, "query").control["ok"] and mark.exists()


def test_a_description_does_not_name_images_that_were_skipped(server: HostileServer, tmp_path: Path) -> None:
    for label in ("benign", "malign"):
        (tmp_path / "ward" / label).mkdir(parents=True)
        for number in range(16):
            Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(tmp_path / "ward" / label / f"{number}.png")
    (tmp_path / "ward/benign/patient 7.png").write_bytes(b"damaged")
    data = f"image_folder(root='{tmp_path}', size=8, skip_unreadable=True)"
    kit = str(server.deployed.kit("node-2"))
    node = server.deployed.start("node-2", "node", ["join", kit, "--data", data, "--domain", "ward"])
    node.wait_for("Connected to", LONG)
    with server.run(SMALL) as run:
        told = run.ask("node-2", WHO_ARE_YOU, "query").control
    assert told["ok"] and "1 unreadable image skipped" in told["description"]["source"]
    assert "patient" not in str(told) and ".png" not in str(told) and str(tmp_path) not in str(told)


def test_a_kit_used_again_with_the_same_keys_gives_the_same_certificate(server: HostileServer) -> None:
    node = server.deployed.join("node-3", "node", "photo")
    certificate = server.deployed.folder / "node-3/keys/node.crt"
    before = certificate.read_bytes()
    node.handle.terminate()
    node.wait(LONG)
    certificate.unlink()
    again = server.deployed.join("node-3", "node", "photo")
    assert certificate.read_bytes() == before
    again.handle.terminate()
    again.wait(LONG)
    words = ["join", str(server.deployed.kit("node-3")), "--data", DATA, "--domain", "photo", "--folder", "thief"]
    thief = server.deployed.start("thief", "node", words)
    assert thief.wait(LONG) == 3 and "was used with other keys" in thief.log


def test_a_log_that_was_changed_is_named_by_the_command(server: HostileServer, tmp_path: Path) -> None:
    for log in (server.deployed.folder / NODE / "audit.jsonl", server.deployed.server_folder / "audit.jsonl"):
        copy = tmp_path / "copy.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        assert len(lines) > 2
        copy.write_bytes(b"".join(lines))
        assert f"chain of {len(lines)} lines is intact" in server.deployed.polyfed("audit", "verify", str(copy))
        for changed in ([lines[0], lines[1].replace(b'"event"', b'"evemt"'), *lines[2:]], [lines[0], *lines[2:]]):
            copy.write_bytes(b"".join(changed))
            done = server.deployed.run_on("server", [str(PROGRAMS / "polyfed"), "audit", "verify", str(copy)])
            assert done.returncode == 2 and "line 2" in " ".join(done.stderr.split()), done.stderr


def test_a_flood_of_refused_requests_is_summed(server: HostileServer) -> None:
    audit, held = server.deployed.server_folder / "audit.jsonl", server.deployed.processes[0].handle
    context = ssl.create_default_context(cafile=server.deployed.server_folder / "certificates/ca.crt")
    context.check_hostname = False
    held.send_signal(signal.SIGSTOP)
    try:
        for number in range(MAX_LINES + 20):
            asked = http.client.HTTPSConnection(HERE, server.deployed.port, timeout=LONG, context=context)
            with contextlib.closing(asked), contextlib.suppress(http.client.RemoteDisconnected):
                asked.request("GET", f"/flood-{number}")
                asked.getresponse()
    finally:
        held.send_signal(signal.SIGCONT)
    summed = server.deployed.audited(audit, {"why": "too many different requests to list"})
    listed = [line for line in lines_of(audit) if str(line.get("path", "")).startswith("/flood-")]
    assert len(listed) + summed["count"] == MAX_LINES + 20 and len(listed) <= MAX_LINES
