"""Client states: packed, and read back bit-identical."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from polyfed.backends.client_store import OWN_TENSOR_FROM, ClientStore
from polyfed.core.rounds import run_round
from polyfed.core.workbench import ClientState, client_digest
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation


def some_kept(seed: int) -> ClientState:
    stream = torch.Generator().manual_seed(seed)
    entries = {
        "mean": torch.randn(5, generator=stream),
        "half": torch.randn(3, 2, generator=stream).to(torch.bfloat16),
        "counter": torch.tensor(7 + seed),
        "wide": torch.randn(2, 3, 4, 4, generator=stream).to(memory_format=torch.channels_last),
        "nothing": torch.zeros(0, 3),
        "double": torch.randn((), dtype=torch.float64, generator=stream),
        "flag": torch.tensor([True, False, True]),
    }
    return ClientState(entries, {"seen": [seed, {"note": torch.ones(2)}]})


def test_states_are_read_back_as_they_were_stored() -> None:
    given = {f"c{seed}": some_kept(seed) for seed in range(4)}
    store = ClientStore(given)
    assert list(store) == list(given) and len(store) == 4
    for client, kept in given.items():
        assert client_digest(store[client]) == client_digest(kept)
        assert list(store[client].entries) == list(kept.entries)
        assert all(torch.equal(store[client].entries[name], value) for name, value in kept.entries.items())
        assert all(store[client].entries[name].dtype == value.dtype for name, value in kept.entries.items())


def test_later_changes_of_a_stored_state_do_not_affect_the_store() -> None:
    kept = some_kept(0)
    store = ClientStore({"c": kept})
    before = client_digest(store["c"])
    kept.entries["mean"].zero_()
    assert client_digest(store["c"]) == before


def test_a_client_can_be_replaced_and_removed() -> None:
    store = ClientStore({"c": some_kept(0)})
    store["c"] = ClientState({}, {"only": 1})
    assert store["c"].entries == {} and store["c"].memory == {"only": 1}
    del store["c"]
    assert "c" not in store
    with pytest.raises(KeyError):
        store["c"]


def test_a_state_that_was_read_is_unchanged_after_its_row_is_reused() -> None:
    store = ClientStore({f"c{index}": some_kept(index) for index in range(3)})
    taken = store["c1"]
    before = client_digest(taken)
    for seed in range(10, 40):
        store["c1"] = some_kept(seed)
    assert client_digest(taken) == before
    assert client_digest(store["c1"]) == client_digest(some_kept(39))
    assert [client_digest(store[f"c{index}"]) for index in (0, 2)] == [client_digest(some_kept(index)) for index in (0, 2)]


def test_a_large_client_is_neither_copied_when_taken_out_nor_overwritten() -> None:
    store = ClientStore({"c": ClientState({"large": torch.zeros(OWN_TENSOR_FROM)})})
    taken, again = store["c"].entries["large"], store["c"].entries["large"]
    assert taken.data_ptr() == again.data_ptr()
    for value in (1.0, 2.0, 3.0):
        store["c"] = ClientState({"large": torch.full((OWN_TENSOR_FROM,), value)})
    assert float(taken.abs().sum()) == 0 and float(store["c"].entries["large"].min()) == 3


def tensors_of(*stores: ClientStore) -> dict[int, int]:
    return {id(row.chunk): row.chunk.values.nbytes for store in stores for row in store._rows.values()}


def test_many_small_clients_use_few_tensors_that_are_hardly_larger_than_their_values() -> None:
    kept = ClientState({"mean": torch.zeros(400), "variance": torch.zeros(400)})
    store = ClientStore({f"c{index}": kept for index in range(2000)})
    tensors = tensors_of(store)
    assert len(tensors) < 20
    assert sum(tensors.values()) < 1.2 * 2000 * 3200


def test_clients_move_between_stores_in_few_tensors_and_unused_ones_are_released() -> None:
    kept = ClientStore({f"c{index}": some_kept(index) for index in range(500)})
    largest = sum(tensors_of(kept).values())
    for turn in range(1, 6):
        staged = kept.sibling()
        staged.update({f"c{index}": some_kept(index + turn) for index in range(500)})
        assert kept.take(staged, without={"c7"}) == {f"c{index}" for index in range(500) if index != 7}
        assert client_digest(kept["c7"]) == client_digest(some_kept(7))
        assert client_digest(kept["c8"]) == client_digest(some_kept(8 + turn))
    del staged
    assert sum(tensors_of(kept).values()) < 2.5 * largest
    slab = next(iter(kept._slabs.values()))
    assert slab.rows == 500
    kept.clear()
    assert slab.rows == 0 and not slab.open


def test_a_shelf_takes_over_from_one_that_has_other_tensors() -> None:
    kept, staged = ClientStore({"a": some_kept(0)}), ClientStore({"a": some_kept(1), "b": some_kept(2)})
    kept.take(staged, without=())
    del staged
    assert [client_digest(kept[name]) for name in "ab"] == [client_digest(some_kept(1)), client_digest(some_kept(2))]


def test_memory_without_entries_costs_no_tensor_a_client() -> None:
    store = ClientStore({f"c{index}": ClientState(memory={"version": str(index)}) for index in range(300)})
    assert sum(tensors_of(store).values()) == 0 and len(tensors_of(store)) < 20
    assert store["c299"].entries == {} and store["c299"].memory == {"version": "299"}


def test_clients_without_memory_do_not_share_one() -> None:
    store = ClientStore({"a": ClientState({"x": torch.ones(1)}), "b": ClientState({"x": torch.ones(1)})})
    store["a"].memory["mine"] = 1
    assert store["b"].memory == {}


def test_rows_are_released_without_torch_as_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore({str(index): ClientState({"x": torch.ones(3)}) for index in range(20)})
    slab = next(iter(store._slabs.values()))
    with monkeypatch.context() as ending:
        ending.setattr(torch, "_C", None)
        store.clear()
    assert slab.rows == 0 and not slab.open


def instructions_of_a_round(clients: int) -> int:
    """Count the Python instructions of a round with five clients, after all clients have trained."""
    federation = tiny_federation({f"c{index:04d}": 4 for index in range(clients)})
    experiment = Experiment(Settings(method="fedbn", rounds=3, batch_size=4, clients_per_round=5), federation, model=TinyNet())
    kept = ClientState({name: experiment.bench.initial[name] for name in experiment.bench.plan.at(1).kept})
    experiment.backend.client_states = dict.fromkeys(experiment.backend.data, kept)
    run_round(experiment.method, experiment.server, experiment.backend, experiment.send_request, 1)
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run_round(experiment.method, experiment.server, experiment.backend, experiment.send_request, 2)
    finally:
        sys.settrace(before)
    return count


def test_a_round_does_nothing_for_clients_that_were_not_sampled() -> None:
    few, many = instructions_of_a_round(30), instructions_of_a_round(2000)
    assert few > 1000
    assert abs(many - few) < 1000
