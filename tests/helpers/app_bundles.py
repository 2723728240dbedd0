"""App bundles that no node should take, each with a piece of the sentence that refuses it."""

from __future__ import annotations

import io
import zipfile

from polyfed.flower.join.bundle_check import LARGEST


def bundle(how: int = zipfile.ZIP_DEFLATED, /, **files: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


def damaged() -> bytes:
    """A bundle whose compressed bytes were changed; its table is whole."""
    whole = bundle(**project())
    begin = whole.index(b"pyproject.toml") + len("pyproject.toml")
    return whole[:begin] + b"\xff" * 8 + whole[begin + 8 :]


def project(client: str = "polyfed.flower.client_app:app", more: str = "") -> dict[str, str]:
    """A ``pyproject.toml`` that Flower itself takes."""
    about = (
        f'[project]\nname = "x"\nversion = "1.0.0"\ndescription = ""\nlicense = "MIT"\n{more}\n[tool.flwr.app]\npublisher = "x"\n'
    )
    return {"pyproject.toml": f'{about}[tool.flwr.app.components]\nserverapp = "x:app"\nclientapp = "{client}"\n'}


OTHER_BUNDLES: dict[str, tuple[bytes, str]] = {
    "another ClientApp": (bundle(**project("hostile:app")), "has another ClientApp"),
    "packages": (bundle(**project(more='dependencies = ["evil"]')), "has dependencies"),
    "code that Python runs at its start": (bundle(**project(), **{"sitecustomize.py": "boom"}), "sitecustomize.py"),
    "a path that leads out": (bundle(**project(), **{"../../x.py": "boom"}), "x.py"),
    "polyfed's own name": (bundle(**project(), **{"polyfed/__init__.py": "boom"}), "polyfed/__init__.py"),
    "a zip bomb": (bundle(**project(), **{"data.bin": "\0" * (LARGEST + 1)}), "unpack to more than"),
    "a project that is a zip bomb": (bundle(**{"pyproject.toml": "#" * (LARGEST + 1)}), "unpack to more than"),
    "a broken project": (bundle(**{"pyproject.toml": "= broken"}), "no readable pyproject.toml"),
    "no project": (bundle(), "no readable pyproject.toml"),
    "a project without tables": (bundle(**{"pyproject.toml": "project = 3\ntool = 4"}), "has another ClientApp"),
    "another compression": (bundle(zipfile.ZIP_LZMA, **project()), "not a readable zip file"),
    "a damaged file": (damaged(), "not a readable zip file"),
    "no zip": (b"no zip", "not a readable zip file"),
}
