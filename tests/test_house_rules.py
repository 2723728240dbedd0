"""Rules of the house that no other test would notice breaking."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import polyfed
from polyfed.method import Method, methods, parse

PACKAGE = Path(polyfed.__file__).parent
CORE = ("run", "conversation", "method", "sharing", "client", "server", "errors", "testing")
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>>" in path.read_text())


@pytest.mark.parametrize("name", CORE)
def test_the_core_names_no_method(name: str) -> None:
    text = (PACKAGE / f"{name}.py").read_text()
    ordinary_words = {"local", "central", "momentum", "median", "guiding"}
    named = [method for method in methods.names() if method not in ordinary_words and re.search(rf"\b{method}\b", text)]
    assert not named


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_print_what_they_say(path: Path) -> None:
    module = importlib.import_module("polyfed." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_only_the_flower_folder_imports_flower() -> None:
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        if "flower" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            guilty += [f"{path.name}: {module}" for module in modules if module.split(".")[0] in ("flwr", "ray", "pickle")]
    allowed = {"unpickle.py: pickle", "from_torchvision.py: pickle"}  # the restricted reader, and the name of an error
    assert set(guilty) <= allowed


def test_methods_of_an_installed_package_are_found_by_their_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> None:
            @polyfed.register
            def from_elsewhere(strength: float = 1.0) -> Method:
                """Comes with another package."""
                return Method("from_elsewhere")

    methods.names()
    monkeypatch.setattr(methods, "_records", dict(methods.known()))
    monkeypatch.setattr(methods, "_discovered", False)
    asked: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [Point()])
    assert str(parse("from_elsewhere(strength=2.0)")) == "from_elsewhere(strength=2.0)"
    assert asked == ["polyfed.methods"]
