"""Trees of values and tensors are packed and come back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.trees import flattened, packed, rebuilt, unpacked

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
