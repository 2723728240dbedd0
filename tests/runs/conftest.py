"""Fixtures for tests of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.recorded_runs import run_until


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "run"
    run_until(folder, 3)
    return folder
