"""Follow docs/own-superlink.md literally: its commands, in its order, in a separate folder and home, without the installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_harness import PROGRAMS, Process, end, logged_process
from helpers.paths import DOCS, EXAMPLES

pytestmark = [pytest.mark.flower, pytest.mark.slow]

PAGE = (DOCS / "own-superlink.md").read_text()
STEP = re.compile(r"^### \d+\. (?P<title>.+?)\n(?P<text>.*?)(?=^##)", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steps() -> dict[str, list[str]]:
    """The commands of each step of the trial on one machine."""
    trial = PAGE.split("## A trial on one machine")[1].split("\n## ")[0] + "\n##"
    return {found["title"]: COMMANDS.findall(found["text"]) for found in STEP.finditer(trial)}


class Terminals:
    """Shells in the trial folder, each started with the lines that the page requires in every terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.first_lines,) = (text for text in steps()["Install"] if text.startswith("source venv"))
        activate = folder / "venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'export PATH="{PROGRAMS}:$PATH"\n')
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR")}
        self.environment = {**kept, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}

    def type(self, text: str, limit: float = 120.0) -> str:
        """Type something that ends by itself; returns what it printed."""
        done = subprocess.run(
            ["bash", "-ec", self.first_lines + text],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def left_running(self, name: str, text: str, until: str) -> Iterator[Process]:
        """Type a command that keeps running; it ends with the ``with`` block."""
        shell = ["bash", "-ec", self.first_lines + text]
        process = logged_process(name, shell, self.folder / f"{name}.log", self.environment, self.folder)
        try:
            process.wait_for(until, 90.0)
            yield process
        finally:
            end(process)


def test_the_trial_of_three_hospitals_works_as_it_is_written(tmp_path: Path) -> None:
    pages = steps()
    assert list(pages) == [
        "Install",
        "Three small hospitals",
        "Certificates and keys",
        "The app",
        "The server",
        "Admit the nodes",
        "The nodes",
        "The run",
    ]
    shutil.copy(EXAMPLES / "digits_mini_as_folders.py", tmp_path)
    terminals = Terminals(tmp_path)
    for title in ("Three small hospitals", "Certificates and keys", "The app"):
        for text in pages[title]:
            terminals.type(text)
    with ExitStack() as running:
        (server,) = pages["The server"]
        running.enter_context(terminals.left_running("server", server, "Uvicorn running"))
        for text in pages["Admit the nodes"]:
            terminals.type(text)
        assert len(pages["The nodes"]) == 3
        for number, text in enumerate(pages["The nodes"], 1):
            running.enter_context(terminals.left_running(f"node-{number}", text, "SuperNode ID:"))
        assert terminals.type("flwr supernode list trial").count("online") == 3
        (run,) = pages["The run"]
        told = terminals.type(run, limit=600.0)
        assert re.search(r"pen\D+\d+\.\d", told), told
        (folder,) = (tmp_path / "runs").iterdir()
        terminals.type(f"polyfed report {folder.relative_to(tmp_path)}")
        assert "fedbn" in (tmp_path / "report.html").read_text()
    # The nodes have ended; the run folder is enough to use the model.
    terminals.type(f"polyfed predict {folder.relative_to(tmp_path)} data/hospital-1/pen")
