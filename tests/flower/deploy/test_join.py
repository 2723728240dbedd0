"""A node that looks after itself, where its server does not answer in time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.flower.deploy.folders import Membership, NodeFolder
from polyfed.flower.join import join
from polyfed.flower.join.enrol import Unreachable


def test_a_renewal_that_a_busy_server_does_not_answer_does_not_end_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = NodeFolder(tmp_path / "node")
    folder.make()
    shown: list[str] = []

    def busy(*_: object) -> bool:
        raise Unreachable("The server cannot be reached (timed out).")

    node = join.JoinedNode(folder, Membership("node-1", "localhost", 8443, ""), shown.append)
    monkeypatch.setattr(join, "renewed", busy)
    node.renew()
    monkeypatch.setattr(join, "renewed", lambda *_: True)
    node.renew()
    assert shown == ["The server cannot be reached (timed out). The certificate is renewed later.", "The certificate was renewed."]
