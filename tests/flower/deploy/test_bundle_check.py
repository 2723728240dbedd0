"""App bundles at a node: settings pass, code does not, unless its hash is listed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.cli.build import build_fab_from_disk

from helpers.app_bundles import OTHER_BUNDLES
from polyfed.flower.app import write_app
from polyfed.flower.join.bundle_check import check_bundle
from polyfed.flower.join.policy import Refused
from polyfed.settings import Settings

# Flower's own packing uses a name of pathspec that newer releases of it will take away.
flowers_packing = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
METHOD = "import polyfed\n\n\n@polyfed.register\ndef mine() -> polyfed.Method:\n    return polyfed.Method()\n"


@flowers_packing
def test_polyfeds_own_bundle_passes(tmp_path: Path) -> None:
    write_app(tmp_path / "app", Settings(), "demo")
    assert check_bundle(build_fab_from_disk(tmp_path / "app"), ()) == []


@flowers_packing
def test_a_file_of_methods_passes_only_where_it_or_its_bundle_is_listed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    write_app(tmp_path / "app", Settings(load=(str(tmp_path / "mine.py"),)), "demo")
    content = build_fab_from_disk(tmp_path / "app")
    with pytest.raises(Refused, match=r"mine\.py"):
        check_bundle(content, ())
    assert check_bundle(content, [hashlib.sha256(METHOD.encode()).hexdigest()]) == ["mine.py"]
    assert check_bundle(content, [hashlib.sha256(content).hexdigest()]) == ["mine.py"]


def test_other_bundles_are_refused() -> None:
    for bundle in OTHER_BUNDLES:
        content, sentence = OTHER_BUNDLES[bundle]
        with pytest.raises(Refused, match=sentence):
            check_bundle(content, ())
