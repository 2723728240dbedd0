"""Folders of servers and nodes, before any process is started; and a node whose server is busy."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.command_line import Command
from polyfed.errors import SettingError
from polyfed.flower.deploy.folders import Membership, NodeFolder, ServerFolder
from polyfed.flower.deploy.kit import Kit
from polyfed.flower.join import join
from polyfed.flower.join.enrol import Unreachable
from polyfed.flower.join.join import load_policy, remove_old_state, write_config
from polyfed.flower.join.policy import Policy
from polyfed.flower.serve.registry import NodeRegistry
from polyfed.flower.serve.serve import Wanted, invite, prepare
from polyfed.runs.folder.audit_log import lines_of
from polyfed.settings import Settings


@pytest.fixture
def node(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path / "node")
    folder.make()
    return folder


def wanted(folder: Path, **changes: Any) -> Wanted:
    return Wanted(**{"settings": Settings(), "recipe": "demo", "host": "localhost", "nodes": 2, "folder": folder, **changes})


def test_state_that_nobody_asked_for_in_the_stated_time_is_removed(node: NodeFolder) -> None:
    for name, days in (("old", 31), ("recent", 2)):
        (node.state / name).mkdir()
        (node.state / name / "a.safetensors").write_bytes(b"x")
        then = time.time() - days * 86400
        for path in (node.state / name / "a.safetensors", node.state / name):
            os.utime(path, (then, then))
    remove_old_state(node, 30)
    assert [path.name for path in node.state.iterdir()] == ["recent"]
    assert [(line["event"], line["run"]) for line in lines_of(node.audit)] == [("state removed", "old")]


def test_the_first_start_writes_the_policy_and_later_ones_must_not_contradict_it(node: NodeFolder) -> None:
    with pytest.raises(SettingError, match="--data DIR"):
        load_policy(node, Policy())
    load_policy(node, Policy(data="/srv/a b", domain="pen"))
    assert load_policy(node, Policy()).data == "/srv/a b"
    with pytest.raises(SettingError, match="has domain = 'pen'"):
        load_policy(node, Policy(domain="photo"))
    write_config(node, Policy.read(node.policy))
    from flwr.common.config import parse_config_args

    config = parse_config_args([str(node.config)])
    assert config == {"data": "/srv/a b", "domain": "pen", "state": str(node.state)}


def test_one_process_at_a_time(node: NodeFolder) -> None:
    with node.locked(), pytest.raises(SettingError, match="already runs"), node.locked():
        pass


def test_a_servers_folder_is_for_one_run(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "server")
    prepare(folder, wanted(folder.path))
    prepare(folder, wanted(folder.path))
    with pytest.raises(SettingError, match="a different settings"):
        prepare(folder, wanted(folder.path, settings=Settings(rounds=7)))
    identity = wanted(folder.path).identity
    folder.describe({**identity, "settings": identity["settings"].replace('"min_share"', '"least_share"')})
    with pytest.raises(
        SettingError,
        match=r"another version of polyfed: its settings differ in least_share, min_share. Finish the run with that version",
    ):
        prepare(folder, wanted(folder.path))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(SettingError, match="not a server folder"):
        prepare(ServerFolder(other), wanted(other))
    assert not [path for path in folder.path.rglob("*") if path.suffix == ".secret" and path.stat().st_mode & 0o077]


def test_what_cannot_be_served_is_said_before_anything_is_made(tmp_path: Path) -> None:
    for changes, sentence in (
        ({"nodes": 0}, "--nodes"),
        ({"port": 0}, "--port"),
        ({"host": "https://x"}, "--host"),
        ({"listen": "here"}, "--listen"),
    ):
        with pytest.raises(SettingError, match=sentence):
            wanted(tmp_path / "server", **changes)


def test_a_kit_holds_no_key_and_is_read_again(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "server")
    prepare(folder, wanted(folder.path))
    (folder.certificates / "ca.crt").write_text("CERTIFICATE")
    with NodeRegistry.changed(folder.path) as registry:
        file = invite(folder, registry, "node-1")
    kit = Kit.read(file)
    assert (kit.name, kit.host, kit.port) == ("node-1", "localhost", 8443)
    assert "PRIVATE" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    file.write_text('name = "../../etc"\nhost = "x"\nport = 1\ntoken = "t"\nauthority = "a"\n')
    with pytest.raises(SettingError, match="is not a"):
        Kit.read(file)
    file.write_text("nonsense")
    with pytest.raises(SettingError, match="is not a"):
        Kit.read(file)


def test_commands_say_what_is_missing(polyfed: Command) -> None:
    for words, sentence in (
        (["join"], "Pass a kit file"),
        (["join", "none.kit", "--data", "x"], "Kit not found"),
        (["join", "--folder", "nowhere"], "is not a node folder"),
        (["nodes", "list"], "is not a server folder"),
        (["nodes", "revoke", "node-1"], "is not a server folder"),
    ):
        done = polyfed(*words)
        assert done.code == 2 and sentence in done.err, done.err


def test_a_renewal_that_a_busy_server_does_not_answer_does_not_end_the_node(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def busy(*_: object) -> bool:
        raise Unreachable("The server cannot be reached (timed out).")

    joined = join.JoinedNode(node, Membership("node-1", "localhost", 8443, ""), shown.append)
    monkeypatch.setattr(join, "renew_certificate", busy)
    joined.renew()
    monkeypatch.setattr(join, "renew_certificate", lambda *_: True)
    joined.renew()
    assert shown == [
        "The server cannot be reached (timed out). The certificate will be renewed later.",
        "The certificate was renewed.",
    ]
