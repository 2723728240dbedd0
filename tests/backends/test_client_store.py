"""What idle clients keep: packed, and given back to the bit."""

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


def test_what_is_taken_out_is_what_was_put_in() -> None:
    given = {f"c{seed}": some_kept(seed) for seed in range(4)}
    shelf = ClientStore(given)
    assert list(shelf) == list(given) and len(shelf) == 4
    for client, kept in given.items():
        assert client_digest(shelf[client]) == client_digest(kept)
        assert list(shelf[client].entries) == list(kept.entries)
        assert all(torch.equal(shelf[client].entries[name], value) for name, value in kept.entries.items())
        assert all(shelf[client].entries[name].dtype == value.dtype for name, value in kept.entries.items())


def test_later_changes_of_what_was_put_in_do_not_reach_the_shelf() -> None:
    kept = some_kept(0)
    shelf = ClientStore({"c": kept})
    before = client_digest(shelf["c"])
    kept.entries["mean"].zero_()
    assert client_digest(shelf["c"]) == before


def test_a_client_can_be_replaced_and_removed() -> None:
    shelf = ClientStore({"c": some_kept(0)})
    shelf["c"] = ClientState({}, {"only": 1})
    assert shelf["c"].entries == {} and shelf["c"].memory == {"only": 1}
    del shelf["c"]
    assert "c" not in shelf
    with pytest.raises(KeyError):
        shelf["c"]


def test_what_was_taken_out_stays_as_it_is_when_its_row_is_used_again() -> None:
    shelf = ClientStore({f"c{index}": some_kept(index) for index in range(3)})
    taken = shelf["c1"]
    before = client_digest(taken)
    for seed in range(10, 40):
        shelf["c1"] = some_kept(seed)
    assert client_digest(taken) == before
    assert client_digest(shelf["c1"]) == client_digest(some_kept(39))
    assert [client_digest(shelf[f"c{index}"]) for index in (0, 2)] == [client_digest(some_kept(index)) for index in (0, 2)]


def test_a_large_client_is_neither_copied_when_taken_out_nor_overwritten() -> None:
    shelf = ClientStore({"c": ClientState({"large": torch.zeros(OWN_TENSOR_FROM)})})
    taken, again = shelf["c"].entries["large"], shelf["c"].entries["large"]
    assert taken.data_ptr() == again.data_ptr()
    for value in (1.0, 2.0, 3.0):
        shelf["c"] = ClientState({"large": torch.full((OWN_TENSOR_FROM,), value)})
    assert float(taken.abs().sum()) == 0 and float(shelf["c"].entries["large"].min()) == 3


def tensors_of(*shelves: ClientStore) -> dict[int, int]:
    """The bytes of all tensors that some shelves hold, by identity."""
    return {id(row.chunk): row.chunk.values.nbytes for shelf in shelves for row in shelf._rows.values()}


def test_many_small_clients_lie_in_few_tensors_that_are_hardly_larger_than_their_values() -> None:
    kept = ClientState({"mean": torch.zeros(400), "variance": torch.zeros(400)})
    shelf = ClientStore({f"c{index}": kept for index in range(2000)})
    tensors = tensors_of(shelf)
    assert len(tensors) < 20
    assert sum(tensors.values()) < 1.2 * 2000 * 3200


def test_clients_move_from_shelf_to_shelf_in_few_tensors_and_what_is_not_needed_is_given_up() -> None:
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
    shelf = ClientStore({f"c{index}": ClientState(memory={"version": str(index)}) for index in range(300)})
    assert sum(tensors_of(shelf).values()) == 0 and len(tensors_of(shelf)) < 20
    assert shelf["c299"].entries == {} and shelf["c299"].memory == {"version": "299"}


def test_clients_without_memory_do_not_share_one() -> None:
    shelf = ClientStore({"a": ClientState({"x": torch.ones(1)}), "b": ClientState({"x": torch.ones(1)})})
    shelf["a"].memory["mine"] = 1
    assert shelf["b"].memory == {}


def test_rows_are_given_back_when_torch_is_gone_as_at_the_end_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = ClientStore({str(index): ClientState({"x": torch.ones(3)}) for index in range(20)})
    slab = next(iter(shelf._slabs.values()))
    with monkeypatch.context() as ending:
        ending.setattr(torch, "_C", None)
        shelf.clear()
    assert slab.rows == 0 and not slab.open


def instructions_of_a_round(clients: int) -> int:
    """How many Python instructions a round of five clients takes, when all have trained before."""
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
