"""Code that travels with an app runs only at nodes that list its hash."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Context, RecordDict

from polyfed.flower import client_app
from polyfed.flower.app import SETTINGS_KEY, settings_text
from polyfed.flower.client_app import problem_with_code
from polyfed.flower.wire.message import DESCRIBE, WireMessage
from polyfed.settings import Settings

TEXT = "raise SystemExit('this code was run')\n"
HASH = hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.fixture
def arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of an app, where Flower unpacks it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / "strange_code.py"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("settings", [{"load": ("strange_code.py",)}, {"model": "strange_code:build"}])
def test_a_node_that_does_not_list_code_runs_none_of_it(
    arrived: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "ask_resident", lambda *_: WireMessage({"ok": True}))
    config = {SETTINGS_KEY: settings_text(Settings(**settings))}  # type: ignore[arg-type]

    def answered(listed: str) -> WireMessage:
        context = Context(run_id=1, node_id=1, node_config={"code": listed}, state=RecordDict(), run_config=config)  # type: ignore[arg-type]
        return client_app.answer_with_listed_code(WireMessage({"what": DESCRIBE}), context)

    refused = answered("f" * 64)
    assert not refused.control["ok"]
    assert f"does not allow the code in strange_code.py (SHA-256 {HASH})" in refused.control["problem"]
    assert answered(f"{'f' * 64} {HASH.upper()}").control["ok"]
    arrived.write_text(TEXT + "# changed\n")
    assert not answered(HASH).control["ok"]


def test_what_is_installed_needs_no_listing() -> None:
    assert problem_with_code(Settings(model="polyfed.testing:TinyNet"), {}) == ""
    assert problem_with_code(Settings(model="os:getcwd"), {}) == ""
    assert problem_with_code(Settings(model="small_cnn"), {}) == ""


def test_a_package_of_the_app_is_looked_at_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "nets.py").write_text(TEXT)
    empty = hashlib.sha256(b"").hexdigest()
    assert "nets.py" in problem_with_code(Settings(model="mine.nets:build"), {"code": empty})
    assert problem_with_code(Settings(model="mine.nets:build"), {"code": f"{empty} {HASH}"}) == ""
