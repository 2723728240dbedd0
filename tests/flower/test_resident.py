"""The resident process of a node: started by the first message, again when it died, gone when its node is."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.errors import ClientFailure
from polyfed.flower.app import settings_text
from polyfed.flower.deploy.private_files import LONGEST_SOCKET_PATH
from polyfed.flower.node import resident
from polyfed.flower.wire.descriptions import own_versions
from polyfed.flower.wire.message import DESCRIBE, WireMessage
from polyfed.settings import Settings

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
SETTINGS = settings_text(Settings(data="digits-mini(per_domain=10)"))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for the process that runs ClientApps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    yield process
    process.kill()
    process.wait()
    for started in resident.STARTED:
        started.wait(20)


def process_at(address: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(address))
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def gone(mark: str, limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if resident.process_mark(int(mark.split(":")[0])) != mark:
            return True
        time.sleep(0.05)
    return False


def test_it_answers_is_started_again_when_it_died_and_ends_with_its_node(tmp_path: Path, node: subprocess.Popen[bytes]) -> None:
    config = {"domain": "pen", "state": str(tmp_path)}
    first = resident.ask_resident(SETTINGS, config, WireMessage({"what": DESCRIBE, "versions": own_versions()}))
    assert first.control["description"]["client"] == "pen"
    address = resident.socket_path(SETTINGS, config)
    number = process_at(address)
    mark = resident.process_mark(number)
    assert resident.ask_resident(SETTINGS, config, WireMessage({"what": DESCRIBE, "versions": own_versions()})) == first
    assert process_at(address) == number, "one process answers them all"

    os.kill(number, signal.SIGKILL)
    assert gone(mark, 5.0)
    assert resident.ask_resident(SETTINGS, config, WireMessage({"what": DESCRIBE, "versions": own_versions()})) == first
    again = resident.process_mark(process_at(address))
    assert int(again.split(":")[0]) != number

    node.kill()
    node.wait()
    assert gone(again, 20.0)


def test_only_this_user_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "resident").mkdir(mode=0o755)
    address = resident.socket_path(SETTINGS, {"state": str(tmp_path)})
    assert address.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ClientFailure, match="belongs to another account"):
        resident.socket_path(SETTINGS, {"state": str(tmp_path)})


def test_a_long_path_does_not_hinder_it(tmp_path: Path) -> None:
    address = resident.socket_path(SETTINGS, {"state": str(tmp_path / ("x" * 120))})
    assert len(str(address)) <= LONGEST_SOCKET_PATH


def test_other_settings_or_nodes_have_processes_of_their_own(tmp_path: Path) -> None:
    config = {"state": str(tmp_path), "domain": "pen"}
    places = {
        resident.socket_path(SETTINGS, config),
        resident.socket_path("{}", config),
        resident.socket_path(SETTINGS, {**config, "domain": "photo"}),
    }
    assert len(places) == 3


def test_what_fails_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {resident.SETTINGS: SETTINGS, resident.CONFIG: {"domain": "nowhere"}}
    told = resident.answer(WireMessage({"what": DESCRIBE, "versions": own_versions()}), job)
    assert not told.control["ok"]
    assert "nowhere" in told.control["problem"]


def test_a_process_that_waits_for_its_threads_ends_when_its_parent_was_killed() -> None:
    child = (
        "import os, threading; from polyfed.flower.node.resident import exit_with, process_mark; "
        "exit_with(process_mark(os.getppid()), 'It'); print(os.getpid(), flush=True); threading.Event().wait()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert started.stdout is not None
    with started.stdout as said:
        mark = resident.process_mark(int(said.readline()))
        assert mark
        started.kill()
        started.wait()
        assert gone(mark, 60)
