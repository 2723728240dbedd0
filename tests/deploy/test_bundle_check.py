"""App bundles at a node: settings pass, code does not, unless its hash is listed."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.cli.build import build_fab_from_disk

from polyfed.deploy.bundle_check import LARGEST, check_bundle
from polyfed.deploy.policy import Refused
from polyfed.flower.app_folder import write_app
from polyfed.settings import Settings

# Flower's own packing uses a name of pathspec that newer releases of it will take away.
flowers_packing = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
METHOD = "import polyfed\n\n\n@polyfed.register\ndef mine() -> polyfed.Method:\n    return polyfed.Method()\n"


def bundle(**files: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


def project(client: str = "polyfed.flower.client_app:app", more: str = "") -> dict[str, str]:
    return {"pyproject.toml": f'[project]\nname = "x"\n{more}\n[tool.flwr.app.components]\nclientapp = "{client}"\n'}


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


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (bundle(**project("hostile:app")), "names another ClientApp"),
        (bundle(**project(more='dependencies = ["evil"]')), "packages installed"),
        (bundle(**project(), **{"sitecustomize.py": "boom"}), "sitecustomize.py"),
        (bundle(**project(), **{"../../x.py": "boom"}), "x.py"),
        (bundle(**project(), **{"polyfed/__init__.py": "boom"}), "polyfed/__init__.py"),
        (bundle(**project(), **{"data.bin": "\0" * (LARGEST + 1)}), "unpack to more than"),
        (bundle(**{"pyproject.toml": "= broken"}), "no pyproject.toml that can be read"),
        (bundle(), "no pyproject.toml that can be read"),
        (b"no zip", "no zip file"),
    ],
)
def test_other_bundles_are_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        check_bundle(content, ())
