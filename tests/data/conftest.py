"""Fixtures of the tests of data."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a separate cache folder."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path_factory.mktemp("cache")))
