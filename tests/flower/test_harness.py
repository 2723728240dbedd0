"""Real Flower processes on loopback: a run over TLS with registered nodes, and nobody else gets in."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_harness import LINK, HarnessError, Process, Trial
from helpers.trial_certificates import make_certificates, node_name
from polyfed.flower.deploy.certificates import CA_CERTIFICATE

APP = """
[project]
name = "hello"
version = "1.0.0"
description = "Says hello twice."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "polyfed"

[tool.flwr.app.components]
serverapp = "hello_app:server"
clientapp = "hello_app:client"

[tool.flwr.app.config]
greeting = "hello"
"""
CODE = """
import json
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query("greet")
def greet(message, context):
    said = f"{message.content['ask']['greeting']} from {context.node_config['domain']}"
    return Message(RecordDict({"answer": ConfigRecord({"said": said})}), reply_to=message)


@server.main()
def main(grid, context):
    nodes = sorted(grid.get_node_ids())
    print("NODES", json.dumps(nodes), flush=True)
    for exchange in range(2):
        begin = time.monotonic()
        ask = RecordDict({"ask": ConfigRecord({"greeting": context.run_config["greeting"]})})
        waiting = set(grid.push_messages([Message(ask, node, "query.greet") for node in nodes]))
        said = []
        while waiting:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                said.append(reply.content["answer"]["said"])
            time.sleep(0.1)
        print("SAID", json.dumps(sorted(said)), flush=True)
        print("SECONDS", round(time.monotonic() - begin, 1), flush=True)
"""
REFUSED_WITHIN, RUN_WITHIN = 300.0, 900.0


def told(log: str, word: str) -> list[list[object]]:
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", log, flags=re.MULTILINE)]


def refused(process: Process, reason: str) -> None:
    """The process gave up by itself, in time, for this reason, and never became a node."""
    process.wait(REFUSED_WITHIN)
    assert reason in process.log
    assert "SuperNode ID:" not in process.log


@pytest.mark.flower
def test_a_run_over_tls_and_nobody_without_the_right_key_and_certificate_gets_in(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "hello_app.py").write_text(CODE)
    strangers = tmp_path / "strangers"
    make_certificates(strangers, nodes=1)
    with Trial(tmp_path, ['domain="sketch"', 'domain="photo"']) as trial:
        keyless = trial.start_node(1, name="keyless", keyless=True, wait=False)
        wrong_key = trial.start_node(1, name="wrong-key", key=strangers / node_name(1), wait=False)
        wrong_authority = trial.start_node(1, name="wrong-ca", root=strangers / CA_CERTIFICATE, wait=False)
        refused(keyless, "All SuperNodes must be registered")
        refused(wrong_key, "Failed to activate SuperNode")
        refused(wrong_authority, "CERTIFICATE_VERIFY_FAILED")
        ended = trial.run(app, "--run-config", 'greeting="good day"', limit=RUN_WITHIN)
        assert ended.status == "finished:completed", ended
        assert [len(nodes) for nodes in told(ended.log, "NODES")] == [2]
        assert told(ended.log, "SAID") == [["good day from photo", "good day from sketch"]] * 2
        trial.stop_node(1)
        trial.start_node(1)
        known = json.loads(trial.flwr("supernode", "list", LINK, "--format", "json"))
        assert [node["status"] for node in known["nodes"]] == ["online", "online"]
    assert not list(trial.left())


def test_no_process_outlives_a_trial_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    sleeper = programs / "flower-superlink"
    sleeper.write_text("#!/bin/sh\nsetsid sleep 60 &\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("helpers.flower_harness.PROGRAMS", programs)
    monkeypatch.setattr("helpers.flower_harness.START_LIMIT", 1.0)
    trial = Trial(tmp_path / "trial", [""])
    begin = time.monotonic()
    with pytest.raises(HarnessError, match="did not say"), trial:
        pass
    assert time.monotonic() - begin < 10
    assert not list(trial.left())
