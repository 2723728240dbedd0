"""What idle clients keep: packed, and given back to the bit."""

from __future__ import annotations

import pytest
import torch

from polyfed.checkpoint import client_digest
from polyfed.client import Kept
from polyfed.simulate.shelf import Shelf


def some_kept(seed: int) -> Kept:
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
    return Kept(entries, {"seen": [seed, {"note": torch.ones(2)}]})


def test_what_is_taken_out_is_what_was_put_in() -> None:
    given = {f"c{seed}": some_kept(seed) for seed in range(4)}
    shelf = Shelf(given)
    assert list(shelf) == list(given) and len(shelf) == 4
    for client, kept in given.items():
        assert client_digest(shelf[client]) == client_digest(kept)
        assert list(shelf[client].entries) == list(kept.entries)
        assert all(torch.equal(shelf[client].entries[name], value) for name, value in kept.entries.items())
        assert all(shelf[client].entries[name].dtype == value.dtype for name, value in kept.entries.items())


def test_later_changes_of_what_was_put_in_do_not_reach_the_shelf() -> None:
    kept = some_kept(0)
    shelf = Shelf({"c": kept})
    before = client_digest(shelf["c"])
    kept.entries["mean"].zero_()
    assert client_digest(shelf["c"]) == before


def test_a_client_can_be_replaced_and_removed() -> None:
    shelf = Shelf({"c": some_kept(0)})
    shelf["c"] = Kept({}, {"only": 1})
    assert shelf["c"].entries == {} and shelf["c"].memory == {"only": 1}
    del shelf["c"]
    assert "c" not in shelf
    with pytest.raises(KeyError):
        shelf["c"]


def test_many_small_clients_share_one_layout_and_hold_one_tensor_each() -> None:
    shelf = Shelf({f"c{index}": some_kept(index) for index in range(50)})
    assert len({id(packed.layout) for packed in shelf._packed.values()}) == 1
    assert all(packed.values.untyped_storage().nbytes() < 700 for packed in shelf._packed.values())
