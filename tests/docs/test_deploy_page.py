"""Follow docs/deploy.md literally: its six commands, in its order, in a separate folder, without the installation."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.deployed import LONG
from helpers.flower_harness import PROGRAMS, Process, end, logged_process
from helpers.paths import DOCS, EXAMPLES
from polyfed.flower.join.policy import Policy

PAGE = (DOCS / "deploy.md").read_text()
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def six_commands() -> list[str]:
    """The commands of the trial, after the install."""
    trial = PAGE.split("## From nothing to a model")[1].split("\n## ")[0]
    return [text.strip() for text in COMMANDS.findall(trial)][1:]


def typed(name: str, command: str, folder: Path) -> Process:
    path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PATH": path}
    return logged_process(name, ["bash", "-c", f"exec {command}"], folder / f"{name}.log", environment, folder)


def test_the_page_counts_its_commands() -> None:
    assert len(six_commands()) == 6
    assert all("\n" not in command for command in six_commands())


def test_the_page_names_every_key_of_node_toml() -> None:
    table = PAGE.split("| key of `node.toml` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(Policy.__dataclass_fields__)


@pytest.mark.flower
@pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="needs nginx")
def test_the_six_commands_work_as_they_are_written(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "digits_mini_as_folders.py", tmp_path)
    data, server, *nodes, use = six_commands()
    assert typed("data", data, tmp_path).wait(LONG) == 0
    with ExitStack() as running:
        serving = typed("server", server, tmp_path)
        running.callback(end, serving)
        serving.wait_for("Waiting for 3 nodes", LONG)
        for number, node in enumerate(nodes, 1):
            running.callback(end, typed(f"node-{number}", node, tmp_path))
        assert serving.wait(LONG) == 0, serving.log
        assert "round 3 of 3" in serving.log and re.search(r"pen\D+\d+\.\d", serving.log), serving.log
    # The nodes have ended; the run folder is enough to use the model.
    predicting = typed("predict", use, tmp_path)
    assert predicting.wait(LONG) == 0, predicting.log
    # A restarted server whose run has finished reports it.
    again = typed("again", server, tmp_path)
    assert again.wait(LONG) == 0 and "The run has finished" in again.log, again.log
