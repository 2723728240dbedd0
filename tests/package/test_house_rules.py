"""Rules of the house that no other test would notice breaking."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

import polyfed
from helpers.paths import PACKAGE
from polyfed.core.method import Method, methods, parse

ORDINARY_WORDS = {"local", "central", "momentum", "median", "guiding", "group_norm", "instance_norm", "layer_norm"}
"""Words of the field, and families of layers, that are also the names of methods."""
MAY_NAME_METHODS = ("methods/", "studies/compare/recipes/shipped/")
"""The methods themselves, tables for the docs that put them side by side, and recipes."""

KNOWN = {
    "settings.py": ["fedavg"],  # the default method
    "core/evaluation.py": ["topk"],  # torch's function
    "studies/report/costs.py": ["fedavg"],  # what costs are set beside
    "models/paper_networks.py": ["fedwon"],  # a start of weights that a paper describes
    "studies/doctor/findings.py": ["fedavg", "fedbn", "fedwon", "fixbn", "gperxan", "perxan"],  # what the doctor recommends
    "studies/doctor/examine.py": ["fedavg"],  # what it is compared with
    "studies/doctor/measures.py": ["fedavg"],  # what clients warm up with
    "papers/costs.py": ["fedbn"],  # a split that a paper describes
    "data/formats/fedbn_lists.py": ["fedbn"],  # a split that a paper describes
    "studies/analyse/gradient_inversion.py": ["fedavg", "fedwon"],  # what is compared
}


def mentions(path: Path) -> list[str]:
    """Names of methods in the code of a file: its names and texts, but neither comments, docstrings, examples nor advice."""
    tree = ast.parse(path.read_text())
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {node.module.rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(found & (set(methods.names()) - ORDINARY_WORDS))


def test_no_code_outside_the_methods_knows_a_method_by_name() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {where: mentions(path) for where, path in files.items() if not where.startswith(MAY_NAME_METHODS)}
    assert {where: names for where, names in found.items() if names} == KNOWN


def test_examples_in_docstrings_print_what_they_say() -> None:
    wrong = []
    for path in sorted(path for path in PACKAGE.rglob("*.py") if ">>>" in path.read_text()):
        if importlib.util.find_spec("flwr") is None and ("import flwr" in (text := path.read_text()) or "from flwr" in text):
            continue
        module = importlib.import_module("polyfed." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        result = doctest.testmod(module)
        wrong += [path.name] if result.failed or not result.attempted else []
    assert not wrong


def test_only_the_flower_and_deploy_folders_import_flower() -> None:
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        if {"flower", "deploy"} & set(path.relative_to(PACKAGE).parts):
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
    allowed = {
        "unpickle.py: pickle",
        "from_torchvision.py: pickle",
        "efficientnet_lite.py: pickle",
        "weights.py: pickle",
    }  # the restricted reader, and the name of an error
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
