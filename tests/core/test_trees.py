"""Trees of plain values and tensors: walked, and written as safetensors files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.trees import as_json, flattened, from_json, leaves_in, map_leaves, map_tensors, packed, rebuilt, tensors_in, unpacked

trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float32)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 5), inner, max_size=3) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=8,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
def test_memory_survives_packing(tree: Any) -> None:
    assert same(unpacked(packed(tree)), tree)
    json_tree, tensors = flattened(tree)
    assert same(rebuilt(json.loads(json.dumps(json_tree)), tensors), tree)


def test_memory_of_other_things_is_refused() -> None:
    with pytest.raises(TypeError, match="function"):
        packed({"f": same})


ONE, TWO = torch.arange(3), torch.ones(2, 2)
TREE: dict[str, Any] = {"a": [ONE, {"b": (TWO, 1, None)}], "c": "text", "d": ()}


def test_leaves_and_tensors_come_in_order() -> None:
    assert [leaf if not isinstance(leaf, Tensor) else "tensor" for leaf in leaves_in(TREE)] == ["tensor", "tensor", 1, None, "text"]
    assert [id(value) for value in tensors_in(TREE)] == [id(ONE), id(TWO)]
    assert list(leaves_in(3)) == [3] and list(tensors_in("text")) == []


def test_maps_change_leaves_and_keep_the_structure() -> None:
    doubled = map_tensors(TREE, lambda value: 2 * value)
    assert torch.equal(doubled["a"][0], 2 * ONE) and torch.equal(doubled["a"][1]["b"][0], 2 * TWO)
    assert doubled["a"][1]["b"][1:] == (1, None) and doubled["c"] == "text" and doubled["d"] == ()
    assert map_leaves({"x": [1, (2,)]}, str) == {"x": ["1", ("2",)]}


def test_a_tree_is_written_with_references_and_read_back() -> None:
    paths: dict[str, Tensor] = {}

    def reference(value: Tensor, path: str) -> str:
        paths[path] = value
        return path

    written = json.loads(json.dumps(as_json(TREE, reference)))
    assert list(paths) == ["/0/0", "/0/1/0/0"]
    back = from_json(written, paths.__getitem__)
    assert back["a"][0] is ONE and back["a"][1]["b"][0] is TWO and back["a"][1]["b"][1:] == (1, None) and back["d"] == ()
    with pytest.raises(TypeError, match="got set"):
        as_json({"x": {1, 2}}, reference)
