"""The start of ``--backend flower`` over a runtime that is slow, that fails, or that never has its nodes. No process of Ray is started."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("ray", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.errors import SettingError
from polyfed.flower import simulation
from polyfed.flower.simulation import Runtime
from polyfed.settings import Settings

SETTINGS = Settings(data="digits-mini", method="fedavg", backend="flower")


class Grid:
    """A Grid whose nodes are registered one by one, as Flower's are while it lends the Grid out."""

    def __init__(self) -> None:
        self.ids = list[int]()

    def get_node_ids(self) -> list[int]:
        return list(self.ids)


def use(monkeypatch: pytest.MonkeyPatch, grid: Grid, register: Any) -> None:
    """Let Flower's entry lend this Grid out at once, and register nodes beside it."""

    def run(*, server_app: Any, num_supernodes: int, **others: Any) -> None:
        lending = threading.Thread(target=server_app, args=(grid, None), daemon=True)
        lending.start()
        register(grid, num_supernodes)
        lending.join()

    monkeypatch.setattr(simulation, "_run_simulation", run)


def test_the_runtime_is_there_when_all_its_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(grid: Grid, nodes: int) -> None:
        for node in range(nodes):
            time.sleep(0.05)
            grid.ids.append(node)

    use(monkeypatch, Grid(), slowly)
    runtime = Runtime(app=None, nodes=5, settings=SETTINGS)  # type: ignore[arg-type]
    assert len(list(runtime.grid.get_node_ids())) == 5
    runtime.close()
    assert not runtime.thread.is_alive()


def test_a_runtime_that_fails_while_it_registers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(grid: Grid, nodes: int) -> None:
        time.sleep(0.1)
        raise RuntimeError("no memory for actors")

    use(monkeypatch, Grid(), fail)
    with pytest.raises(SettingError, match="did not start: no memory for actors"):
        Runtime(app=None, nodes=2, settings=SETTINGS)  # type: ignore[arg-type]


def test_a_runtime_without_its_nodes_is_given_up_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "START_LIMIT", 0.3)
    use(monkeypatch, Grid(), lambda grid, nodes: grid.ids.append(1))
    with pytest.raises(SettingError, match=r"has 1 of 3 nodes after 0\.3 s"):
        Runtime(app=None, nodes=3, settings=SETTINGS)  # type: ignore[arg-type]


def test_clients_are_divided_evenly_and_in_order() -> None:
    pytest.importorskip("ray")
    from polyfed.flower.simulation import divided

    clients = [str(number) for number in range(10)]
    shares = list(divided(clients, 4))
    assert [client for share in shares for client in share] == clients
    assert {len(share) for share in shares} == {2, 3}
    assert list(divided(clients[:1], 1)) == [["0"]]
