"""The contract of backends: what is used of a backend is declared, what is declared is used, and every backend has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyfed
from polyfed.backends.base import Backend
from polyfed.backends.fused import Fused
from polyfed.backends.in_process import Debug, InProcess, WithoutData
from polyfed.backends.workers import Workers
from polyfed.core.rounds import Transaction
from polyfed.runs.experiment import Experiment
from polyfed.runs.reopen import without_data
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

PACKAGE = Path(polyfed.__file__).parent
OF_A_ROUND = {"commit", "rollback"}
"""The loop knows a backend by these only, as a ``Transaction``."""
MEMBERS = {
    "__call__",
    *("remote", "leaves_newcomer", "data", "infos", "replace_data"),
    *("client_states", "changed", "state_of", "can_read", "retain", "keep_in", "client_digests"),
    *("losses_of_round", "validations_of_round", "close"),
}


def declared(protocol: type) -> set[str]:
    """The members that a protocol declares itself."""
    names = {name for name in vars(protocol) if not name.startswith("_") or name == "__call__"} | set(protocol.__annotations__)
    return names


def used(tree: ast.AST) -> Iterator[str]:
    """Attributes of whatever is called ``backend``; the setting of that name is text."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value
        if isinstance(of, ast.Name) and of.id == "backend":
            yield node.attr
        if isinstance(of, ast.Attribute) and of.attr == "backend" and "settings" not in ast.unparse(of):
            yield node.attr


def test_what_is_used_of_a_backend_is_what_the_protocol_declares() -> None:
    outside = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("backends", "flower")]
    found = {name for path in outside for name in used(ast.parse(path.read_text()))}
    assert found == MEMBERS - {"__call__"}
    assert declared(Backend) == MEMBERS
    assert declared(Transaction) == OF_A_ROUND


def test_every_member_is_documented() -> None:
    text = Backend.__doc__ or ""
    undocumented = [name for name in MEMBERS if not getattr(vars(Backend).get(name), "__doc__", "") and f" {name}:" not in text]
    assert not undocumented


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(InProcess, {}), (Workers, {"workers": "2"}), (Fused, {"backend": "fused"}), (Debug, {"backend": "debug"}), (WithoutData, {})],
)
def test_every_backend_has_every_member(kind: type, changes: dict[str, str]) -> None:
    chosen = {"backend": without_data(at_nodes=False)} if kind is WithoutData else {}
    backend = Experiment(Settings(**changes), tiny_federation(), "fedbn", TinyNet, **chosen).backend  # type: ignore[arg-type]
    assert type(backend) is kind
    assert not [name for name in MEMBERS | OF_A_ROUND if not hasattr(backend, name)]


def test_the_flower_backend_has_every_member() -> None:
    pytest.importorskip("flwr")
    from polyfed.flower.server.backend import FlowerBackend
    from polyfed.flower.server.roster import Roster

    bench = Experiment(Settings(), tiny_federation(), "fedbn", TinyNet).bench
    backend = FlowerBackend(bench, tiny_federation().clients, Roster(None))  # type: ignore[arg-type]
    assert not [name for name in MEMBERS | OF_A_ROUND if not hasattr(backend, name)]
