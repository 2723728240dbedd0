"""The command line in the tests' own process, images for it, and what an error must look like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyfed.cli.guard import INTERNAL_ERROR_MESSAGE
from polyfed.cli.main import app
from polyfed.core.method import methods

DOMAINS, CLASSES = ("day", "night"), ("disk", "stripe")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is not JSON")

        return json.loads(self.out.splitlines()[-1], parse_constant=refuse)


Command = Callable[..., Ended]


@pytest.fixture
def polyfed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Run a command in this process, in a folder of its own; methods it loads are forgotten."""
    methods.discover()
    monkeypatch.setattr(methods, "_records", dict(methods.known()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def command(*args: str | Path) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            app.main([str(arg) for arg in args], prog_name="polyfed")
        printed = capsys.readouterr()
        assert INTERNAL_ERROR_MESSAGE not in printed.err, printed.err
        return Ended(int(end.value.code or 0), printed.out, printed.err)

    return command


def as_process(folder: Path, *args: str | Path) -> Ended:
    """Run a command in a process of its own, in a folder."""
    words = [sys.executable, "-m", "polyfed", *map(str, args)]
    variables = {**os.environ, "COLUMNS": "160", "POLYFED_CACHE": str(folder / "cache")}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def picture(label: str, dark: bool, rng: np.random.Generator) -> Image.Image:
    grid = np.mgrid[0:20, 0:20]
    shape = ((grid[0] - 10) ** 2 + (grid[1] - 10) ** 2 < 40) if label == "disk" else (grid[1] % 6 < 3)
    light = np.where(shape, 200, 40) * (0.4 if dark else 1.0)
    return Image.fromarray((light[..., None] + rng.uniform(0, 20, (20, 20, 3))).astype(np.uint8))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two domains of two classes that are easily told apart."""
    rng = np.random.default_rng(3)
    root = tmp_path / "pictures"
    for domain in DOMAINS:
        for label in CLASSES:
            (root / domain / label).mkdir(parents=True)
            for number in range(20):
                picture(label, domain == "night", rng).save(root / domain / label / f"{number:02d}.png")
    return root


SHORT = ("--rounds", "2", "--batch-size", "8", "--lr", "0.05")


def says(ended: Ended, *words: str) -> None:
    """One sentence on standard error, exit code 2, nothing on standard output."""
    lines = ended.err.strip().splitlines()
    assert ended.code == 2
    assert len(lines) == 1 and lines[0].startswith("polyfed: "), ended.err
    assert ended.out == ""
    for word in words:
        assert word in lines[0], lines[0]


STOPPER = '''
from pathlib import Path
from polyfed import Method, register

def stop(step):
    """Stop in the middle of round 2, after one client has trained."""
    if step.client.round == 2 and step.client.id == "night" and Path("stop").exists():
        raise KeyboardInterrupt

@register
def stopper() -> Method:
    """Stop."""
    return Method("stopper", gradients=(stop,), standalone=False)
'''
