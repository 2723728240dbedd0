"""The tutorials: follow each one from top to bottom in one shell, in a separate folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import DOCS, EXAMPLES, SOURCE

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
BLOCK = re.compile(r"(?P<before>[^\n]*\n\n)^```(?P<language>sh|python)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"`(\w+\.py)`:$")
"""Ends the line before a block that the reader saves to a file."""
LEFT_BEHIND = {
    "choose-with-the-doctor.md": ("runs/chosen", "chosen.html"),
    "first-run.md": ("runs/first/run.toml", "runs/compared", "report.html"),
    "hospital-images.md": ("my_images/print", "runs/hospitals", "runs/without-print/run.toml", "model.onnx"),
    "own-method.md": ("my_method.py", "runs/unsure", "runs/heads/run.toml"),
    "read-a-report.md": ("runs/read", "report.html"),
    "three-nodes.md": ("polyfed-server/run/run.toml", "report.html"),
}
WITH_NODES = (
    pytest.mark.flower,
    pytest.mark.skipif(
        importlib.util.find_spec("flwr") is None or shutil.which("nginx", path="/usr/sbin:/usr/bin") is None,
        reason="needs Flower and nginx",
    ),
)
LIMIT = 1800


def script(page: Path) -> str:
    """Return all commands of a tutorial as a shell script. Python blocks are saved if the line before says so, otherwise run."""
    parts = ["set -euxo pipefail"]
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        saved = SAVED.search(block["before"].strip())
        if block["language"] == "sh":
            parts.append(block["body"])
        else:
            parts.append(f"{f'cat > {saved[1]}' if saved else 'python -'} <<'END OF BLOCK'\n{block['body']}END OF BLOCK")
    return "\n".join(parts) + "\n"


def test_every_tutorial_says_what_it_leaves_behind() -> None:
    assert [page.name for page in TUTORIALS] == sorted(LEFT_BEHIND)


def test_no_block_is_left_out() -> None:
    for page in TUTORIALS:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^```\w+$", text, re.MULTILINE)), page.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=WITH_NODES if page.name == "three-nodes.md" else ()) for page in TUTORIALS],
)
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
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    (tmp_path / "typed.sh").write_text(script(page), encoding="utf-8")
    with (tmp_path / "shown.log").open("w") as shown:
        shell = subprocess.Popen(
            ["bash", "typed.sh"], cwd=tmp_path, env=environment, stdout=shown, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = shell.wait(LIMIT)
        finally:
            with_its_children(shell)
    logs = "\n".join(f"{log.name}: {log.read_text(encoding='utf-8')[-4000:]}" for log in sorted(tmp_path.glob("*.log")))
    assert code == 0, logs
    for name in LEFT_BEHIND[page.name]:
        assert (tmp_path / name).exists(), name


def with_its_children(shell: subprocess.Popen[bytes]) -> None:
    """End what the shell has left running: everything in its session."""
    try:
        os.killpg(shell.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
