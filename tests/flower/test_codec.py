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

from polyfed.flower.records import Arrays, size_of, wire_message_of

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
    content = Arrays().records(Encoder().encode(payload, {"round": 3}))
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
    weights, encoder, arrays = {"w": torch.ones(5)}, Encoder(), Arrays()
    wire_messages = [encoder.encode(Payload(weights, {"split": "test"}), {}) for _ in range(2)]
    contents = [arrays.records(wire_message) for wire_message in wire_messages]
    assert contents[0]["entries"]["w"] is contents[1]["entries"]["w"]


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
    content = Arrays().records(Encoder().encode(Payload({"w": torch.ones(1000)}), {"text": "x" * 500}))
    assert 4500 < size_of(content) < 4700


def test_the_process_that_flower_starts_for_each_message_need_not_import_torch() -> None:
    code = (
        "import sys, polyfed.flower.client_app, polyfed.flower.resident; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entries_keep_their_order_on_the_way() -> None:
    entries = {name: torch.zeros(1) for name in ("z", "a", "m")}
    content = Arrays().records(Encoder().encode(Payload(entries), {}))
    children = {child.object_id: child for child in content.children.values()}
    again = RecordDict.inflate(content.deflate(), children)
    assert list(wire_message_of(again).blocks["entries"]) == ["z", "a", "m"]
