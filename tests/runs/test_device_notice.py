"""A machine with a GPU: the notice that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.command_line import SHORT, Command


def test_a_gpu_that_is_not_used_is_one_line(polyfed: Command, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "This machine has a GPU, but the run uses the CPU. Use --device cuda to train on the GPU (untested)."
    assert line not in " ".join(polyfed("run", images, *SHORT).err.split())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ended = polyfed("run", images, *SHORT, "--seed", "1")
    assert ended.code == 0 and " ".join(ended.err.split()).count(line) == 1
