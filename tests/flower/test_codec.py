"""Payloads survive the way over Flower's records and over a socket to the bit."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.conversation import Payload
from polyfed.flower.codec import DTYPES, Encoder, payload_of, tensor_of
from polyfed.flower.wire_message import BadMessage, Block, WireMessage, receive, send

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.flower.packing import unpacked
from polyfed.flower.records import records_of, size_of, wire_message_of

names = st.text(min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(shapes)
    count = math.prod(shape) * DTYPES[dtype].itemsize
    # Any bits at all: NaNs with payloads, infinities, subnormal numbers.
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[:count].view(DTYPES[dtype]).reshape(shape)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(
    plain | tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(names, inner, max_size=3),
)
payloads = st.builds(Payload, st.dictionaries(names, tensors(), max_size=4), st.dictionaries(names, trees, max_size=3))


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bool((bits[0] == bits[1]).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None)
@given(payloads)
def test_a_payload_survives_flowers_records(payload: Payload) -> None:
    content = records_of([Encoder().encode(payload, {"round": 3})])[0]
    wire_message = wire_message_of(content)
    again = payload_of(wire_message)
    assert wire_message.control["round"] == 3
    assert same(dict(payload.entries), dict(again.entries))
    assert same(dict(payload.extras), dict(again.extras))


@settings(max_examples=30, deadline=None)
@given(payloads)
def test_a_payload_survives_a_socket(payload: Payload) -> None:
    ends = socket.socketpair()
    with ends[0], ends[1]:
        sender = threading.Thread(target=send, args=(ends[0], Encoder().encode(payload, {"loss": 0.1})))
        sender.start()
        wire_message = receive(ends[1])
        sender.join()
    again = payload_of(wire_message)
    assert wire_message.control["loss"] == 0.1
    assert same(dict(payload.entries), dict(again.entries))
    assert same(dict(payload.extras), dict(again.extras))


def test_what_arrives_can_be_written_to_and_shares_nothing() -> None:
    value = torch.arange(4.0)
    block = Encoder().block(value)
    first, second = tensor_of(block), tensor_of(block)
    first.add_(1)
    assert torch.equal(value, torch.arange(4.0))
    assert torch.equal(second, value)


def test_a_tensor_that_goes_to_all_clients_is_encoded_once() -> None:
    weights, encoder = {"w": torch.ones(5), "v": torch.ones(3, dtype=torch.int64)}, Encoder()
    own = [torch.full((2,), float(number)) for number in range(2)]
    contents = records_of([encoder.encode(Payload(weights, {"own": value}), {}) for value in own])
    assert [list(content["tensors"]) for content in contents] == [["0", "1"]] * 2
    assert contents[0]["tensors"]["0"] is contents[1]["tensors"]["0"]
    assert len(contents[0]["tensors"]["0"].data) == 5 * 4 + 3 * 8
    for content, value in zip(contents, own, strict=True):
        assert same(dict(payload_of(wire_message_of(content)).extras), {"own": value})


def test_many_tensors_travel_in_one_array() -> None:
    """Flower fetches an array by requests of its own: 116 of them cost 26 s a round."""
    entries = {f"layer{number}": torch.full((number,), float(number)) for number in range(116)}
    (content,) = records_of([Encoder().encode(Payload(entries), {})])
    assert [len(record) for record in content.array_records.values()] == [1]
    assert same(entries, dict(payload_of(wire_message_of(content)).entries))


ROW = ["entries", "w", "float32", [2], 8, "0"]


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (None, "where its tensors lie"),
        ([ROW, ["entries", "v", "float32", [2], 8, "0"]], "behind the end"),
        ([], "more bytes"),
        ([["entries", "w", "float32", [1], 4, "0"]], "more bytes"),
        ([["entries", "w", "float32", [0], 0, "0"], ROW], "twice or nowhere"),
        ([["entries", "w", "float32", [2], 8, "1"]], "twice or nowhere"),
        ([["entries", "w", "float32", [2], -8, "0"]], "a row of its layout"),
        ([["entries", "w", "float32", [2], True, "0"]], "a row of its layout"),
        ([["entries", "w", "float32", "2", 8, "0"]], "a row of its layout"),
        ([[["entries"], "w", "float32", [2], 8, "0"]], "a row of its layout"),
        ([ROW[:-1]], "a row of its layout"),
        (["w"], "a row of its layout"),
    ],
)
def test_a_layout_that_does_not_fit_its_arrays_is_refused(layout: object, why: str) -> None:
    assert tensor_of(unpacked([ROW], {"0": bytes(8)})["entries"]["w"]).tolist() == [0, 0]
    with pytest.raises(BadMessage, match=why):
        unpacked(layout, {"0": bytes(8)})


def test_only_part_of_a_tensor_travels() -> None:
    view = torch.arange(100.0).reshape(10, 10)[:, 3]
    wire_message = Encoder().encode(Payload({"column": view}), {})
    assert wire_message.size == 40
    assert torch.equal(payload_of(wire_message).entries["column"], view)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Block("float32", (3,), bytes(8)), "bytes do not make"),
        (Block("object", (1,), bytes(8)), "no type"),
        (Block("float32", (-1, -2), bytes(8)), "no shape"),
        (Block("bool", (1,), b"\2"), "neither 0 nor 1"),
    ],
)
def test_a_block_that_lies_is_refused(block: Block, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        tensor_of(block)


@pytest.mark.parametrize(
    "tree",
    [None, {"tensor": "/0"}, {"map": 3}, {"value": 1}, {"list": []}, {"map": [[{"list": []}, {"value": 1}]]}, {"a": 1, "b": 2}],
)
def test_extras_that_cannot_be_put_together_are_refused(tree: object) -> None:
    with pytest.raises(BadMessage, match="extras"):
        payload_of(WireMessage({"extras": tree}))


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"polyfed": ConfigRecord({"control": "[1]"})}),
        RecordDict({"polyfed": ConfigRecord({"control": "{"})}),
        RecordDict({"polyfed": ConfigRecord({"control": 4})}),
        RecordDict({"polyfed": ConfigRecord({"control": "{}"}), "entries": ArrayRecord({"a": Array(torch.ones(2).numpy())})}),
    ],
)
def test_messages_of_others_are_refused(content: RecordDict) -> None:
    with pytest.raises(BadMessage):
        wire_message_of(content)


def test_the_size_of_a_message_is_known_before_it_is_read() -> None:
    content = records_of([Encoder().encode(Payload({"w": torch.ones(1000)}), {"text": "x" * 500})])[0]
    assert 4500 < size_of(content) < 4700


def test_the_process_that_flower_starts_for_each_message_need_not_import_torch() -> None:
    code = (
        "import sys, polyfed.flower.client_app, polyfed.flower.resident; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entries_keep_their_order_on_the_way() -> None:
    entries = {name: torch.zeros(1) for name in ("z", "a", "m")}
    content = records_of([Encoder().encode(Payload(entries), {})])[0]
    children = {child.object_id: child for child in content.children.values()}
    again = RecordDict.inflate(content.deflate(), children)
    assert list(wire_message_of(again).blocks["entries"]) == ["z", "a", "m"]
