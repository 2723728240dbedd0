"""The members of every backend, the choice of a backend, and clients in this process."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polyfed
from helpers import tiny_runs
from polyfed.backends.base import Backend
from polyfed.backends.choose import ENTRY_POINTS, OWN
from polyfed.backends.fused import Fused
from polyfed.backends.in_process import Debug, InProcess, WithoutData
from polyfed.backends.workers import Workers
from polyfed.core.rounds import Payload, Transaction
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.runs.reopen import without_data
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

PACKAGE = Path(polyfed.__file__).parent
OF_A_ROUND = {"commit", "rollback"}
"""The members that the loop uses, as a ``Transaction``."""
MEMBERS = {
    "__call__",
    *("remote", "leaves_newcomer", "data", "infos", "replace_data"),
    *("client_states", "changed", "state_of", "can_read", "retain", "keep_in", "client_digests"),
    *("losses_of_round", "validations_of_round", "workers_usage", "close"),
}


def declared(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_") or name == "__call__"} | set(protocol.__annotations__)


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of objects named ``backend``, except the setting of this name."""
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
    [
        (InProcess, {"workers": "1"}),
        (Workers, {"workers": "2"}),
        (Fused, {"backend": "fused"}),
        (Debug, {"backend": "debug"}),
        (WithoutData, {}),
    ],
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


class Counting(InProcess):
    pass


class Points(dict[str, Any]):
    @property
    def names(self) -> set[str]:
        return set(self)


def experiment(backend: str) -> Experiment:
    return Experiment(Settings(batch_size=4, backend=backend), tiny_federation(), "fedavg", TinyNet())


def test_a_backend_registered_by_an_entry_point_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.entry_points

    def points(group: str) -> Any:
        return Points(counting=SimpleNamespace(load=lambda: Counting)) if group == ENTRY_POINTS else real(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", points)
    assert type(experiment("counting").backend) is Counting


def test_an_unknown_backend_is_an_error_that_suggests_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"There is no backend 'fusd'.*fused"):
        experiment("fusd")


def test_polyfed_registers_its_flower_backend_and_its_methods() -> None:
    assert "flower" in importlib.metadata.entry_points(group="polyfed.backends").names
    assert importlib.metadata.entry_points(group="polyfed.methods")["polyfed"].value == "polyfed.methods"
    assert set(OWN) == {"process", "fused", "auto", "debug"}


trained = functools.partial(tiny_runs.trained, rounds=3)
digest_of = functools.partial(tiny_runs.digest_of, rounds=3)


def test_backend_and_repetition_do_not_change_bits() -> None:
    assert digest_of("fedbn") == digest_of("fedbn") == digest_of("fedbn", backend="debug")


def test_simulated_dropouts_are_repeatable_and_leave_state_alone() -> None:
    one, two = (trained("fedbn", drop=0.4, rounds=6, min_share=0.1) for _ in range(2))
    assert Result(one, []).digest == Result(two, []).digest
    assert Result(one, []).digest != digest_of("fedbn", rounds=6)


def test_memory_grows_only_by_local_entries() -> None:
    experiment = trained("silobn", tiny_federation({f"c{i}": 5 for i in range(12)}))
    local = sum(v.numel() * v.element_size() for n, v in TinyNet().state_dict().items() if "running" in n or "num_batches" in n)
    held = sum(v.numel() * v.element_size() for kept in experiment.backend.client_states.values() for v in kept.entries.values())
    assert held == 12 * local


def test_payloads_share_the_servers_tensors() -> None:
    experiment = trained("fedavg", rounds=1)
    request = experiment.server.request("train", experiment.server.sample_clients())
    payloads: list[Payload] = list(request.payloads.values())
    assert all(p.entries["head.weight"] is experiment.server.state["head.weight"] for p in payloads)
