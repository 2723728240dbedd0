"""The tutorials: every shell and Python block is run, one after the other, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import DOCS, EXAMPLES, SOURCE

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(?P<language>sh|python)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_BEHIND = {
    "first-run.md": ("runs/first/run.toml", "runs/compared", "report.html"),
    "hospital-images.md": ("my_images/print", "runs/hospitals", "runs/without-print/run.toml", "model.onnx"),
    "read-a-report.md": ("runs/read", "report.html"),
}


def test_every_tutorial_says_what_it_leaves_behind() -> None:
    assert [page.name for page in TUTORIALS] == sorted(LEFT_BEHIND)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_all_blocks_run(page: Path, tmp_path: Path) -> None:
    if "--to onnx" in page.read_text(encoding="utf-8"):
        pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'polyfed[export]'")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, call in (("polyfed", f"{sys.executable} -m polyfed"), ("python", sys.executable)):
        (commands / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PATH": f"{commands}:{os.environ['PATH']}"}
    blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
    assert blocks
    for block in blocks:
        call = (
            ["bash", "-euo", "pipefail", "-c", block["body"]]
            if block["language"] == "sh"
            else [sys.executable, "-c", block["body"]]
        )
        ended = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900)
        assert ended.returncode == 0, f"{block['body']}\n{ended.stdout}\n{ended.stderr}"
    for name in LEFT_BEHIND[page.name]:
        assert (tmp_path / name).exists(), name
