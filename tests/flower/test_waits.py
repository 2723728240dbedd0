"""Flower's waits are shortened in the modules that have them, and stay where a release has others."""

from __future__ import annotations

import importlib
import logging
import time

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.flower.wire import waits


def test_a_node_of_this_release_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    node = importlib.import_module(waits.NODE)
    monkeypatch.setattr(node, "time", time)
    monkeypatch.setattr(node, "pull_objects", node.pull_objects)
    slept: list[float] = []
    monkeypatch.setattr(waits.time, "sleep", slept.append)
    assert waits.shorten_node() and waits.shorten_node(), "a second time changes nothing"
    for seconds in (3, 0.5, 0.01):
        node.time.sleep(seconds)
    assert slept == [0.5, 0.05, 0.01]
    assert node.time.monotonic() > 0
    assert node.pull_objects.keywords == {"initial_backoff": 0.1, "backoff_cap": 0.5}


def test_the_server_asks_again_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = importlib.import_module(waits.SERVER)
    monkeypatch.setattr(grid, "pull_objects", grid.pull_objects)
    assert waits.shorten_server()
    assert grid.pull_objects.keywords["initial_backoff"] == 0.1


def test_clientapps_ask_again_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    clientapp = importlib.import_module(waits.CLIENTAPP)
    monkeypatch.setattr(clientapp, "pull_and_inflate_object_from_tree", clientapp.pull_and_inflate_object_from_tree)
    assert waits.shorten_clientapp()
    assert clientapp.pull_and_inflate_object_from_tree.keywords == {"initial_backoff": 0.1, "backoff_cap": 0.5}


def test_another_release_keeps_its_own_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waits, "NODE", "flwr.no_such_module")
    with caplog.at_level(logging.INFO, "polyfed"):
        assert not waits.shorten_node()
    assert "its own waits stay" in caplog.text
