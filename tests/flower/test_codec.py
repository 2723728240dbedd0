"""Payloads survive the way over Flower's records, sockets and bundles bit-identically; what is damaged is refused."""

from __future__ import annotations

import json
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

from polyfed.core.rounds import Payload
from polyfed.flower.wire.codec import Encoder, payload_of, read_tensors
from polyfed.flower.wire.message import BadMessage, WireMessage, bundled, receive, send, unbundled
from polyfed.trees import SAFETENSORS_NAMES, file_pieces

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.flower.wire.records import records_of, size_of, wire_message_of

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*SAFETENSORS_NAMES, torch.complex64, torch.complex128)}
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
    message = Encoder().encode(Payload({"w": value}), {})
    first, second = payload_of(message).entries["w"], payload_of(message).entries["w"]
    first.add_(1)
    assert torch.equal(value, torch.arange(4.0))
    assert torch.equal(second, value)


def test_tensors_that_go_to_all_clients_are_encoded_once() -> None:
    weights, encoder = {"w": torch.ones(5), "v": torch.ones(3, dtype=torch.int64)}, Encoder()
    own = [torch.full((2,), float(number)) for number in range(2)]
    contents = records_of([encoder.encode(Payload(weights, {"own": value}), {}) for value in own])
    assert [list(content["tensors"]) for content in contents] == [["entries", "extras"]] * 2
    assert contents[0]["tensors"]["entries"] is contents[1]["tensors"]["entries"]
    assert 5 * 4 + 3 * 8 < len(contents[0]["tensors"]["entries"].data) < 300
    for content, value in zip(contents, own, strict=True):
        assert same(dict(payload_of(wire_message_of(content)).extras), {"own": value})


def test_extras_that_go_to_all_clients_are_encoded_once() -> None:
    shared, encoder = torch.ones(5), Encoder()
    first, second = (encoder.encode(Payload({}, {"all": shared, "number": number}), {}) for number in range(2))
    assert first.blobs["extras"] is second.blobs["extras"]
    assert [payload_of(message).extras["number"] for message in (first, second)] == [0, 1]


def test_tensors_in_another_order_or_under_other_names_are_not_taken_for_the_same() -> None:
    a, b, encoder = torch.zeros(1), torch.ones(1), Encoder()
    for entries in ({"a": a, "b": b}, {"a": b, "b": a}, {"b": b}, {"c": b}, {"b": b.clone()}):
        assert same(dict(payload_of(encoder.encode(Payload(entries), {})).entries), entries)


def test_many_tensors_travel_in_one_array() -> None:
    entries = {f"layer{number}": torch.full((number,), float(number)) for number in range(116)}
    (content,) = records_of([Encoder().encode(Payload(entries, {"round": 3}), {})])
    assert [len(record) for record in content.array_records.values()] == [1]
    assert same(entries, dict(payload_of(wire_message_of(content)).entries))


def test_many_messages_travel_as_one_with_shared_tensors_once() -> None:
    weights, encoder = {"w": torch.rand(100)}, Encoder()
    messages = [encoder.encode(Payload(weights, {"own": torch.full((2,), float(n))}), {"client": str(n)}) for n in range(5)]
    bundle = bundled(messages)
    assert len(bundle.blobs) == 1 + 5 and 400 + 5 * 8 < bundle.size < 400 + 5 * 8 + 6 * 100
    (content,) = records_of([bundle])
    for number, message in enumerate(unbundled(wire_message_of(content))):
        payload = payload_of(message)
        assert message.control["client"] == str(number)
        assert torch.equal(payload.entries["w"], weights["w"])
        assert torch.equal(payload.extras["own"], torch.full((2,), float(number)))


def test_a_bundle_that_cannot_be_taken_apart_is_refused() -> None:
    for control in ({}, {"bundle": 3}, {"bundle": [[{}, {"entries": "7"}]]}, {"bundle": [[{}]]}):
        with pytest.raises(BadMessage, match="its bundle"):
            unbundled(WireMessage(control))


def test_only_part_of_a_tensor_travels() -> None:
    view = torch.arange(100.0).reshape(10, 10)[:, 3]
    wire_message = Encoder().encode(Payload({"column": view}), {})
    assert 40 < wire_message.size < 40 + 100
    assert torch.equal(payload_of(wire_message).entries["column"], view)


def file(header: object, data: bytes) -> list[bytes]:
    """A safetensors file with this header, whatever it says."""
    text = json.dumps(header).encode()
    return [len(text).to_bytes(8, "little") + text, data]


def row(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_that_lies_is_refused() -> None:
    for blob, why in (
        ([b""], "cannot be read"),
        ([b"short"], "cannot be read"),
        ([(2**62).to_bytes(8, "little")], "cannot be read"),
        (file([], b""), "cannot be read"),
        (file({"/0": ["F32", [2], 8]}, bytes(8)), "cannot be read"),
        (file({"/0": row("F32", [3], 0, 8)}, bytes(8)), "cannot be read"),
        (file({"/0": row("F32", [2], 0, 8)}, bytes(9)), "cannot be read"),
        (file({"/0": row("F32", [2], 0, 8)}, bytes(7)), "cannot be read"),
        (file({"/0": row("F32", [2], 4, 12)}, bytes(12)), "cannot be read"),
        (file({"/0": row("F32", [2], 8, 0)}, bytes(8)), "cannot be read"),
        (file({"/0": row("F32", [-1, -2], 0, 8)}, bytes(8)), "cannot be read"),
        (file({"/0": row("F32", [2**62, 2**62], 0, 8)}, bytes(8)), "cannot be read"),
        (file({"/0": row("F32", [2], 0, 8), "/1": row("F32", [2], 0, 8)}, bytes(8)), "cannot be read"),
        (file({"/0": row("OBJECT", [1], 0, 8)}, bytes(8)), "cannot be read"),
        (file({"/0": row("F8_E5M2", [8], 0, 8)}, bytes(8)), "have the type"),
        (file({"/0": row("BOOL", [1], 0, 1)}, b"\2"), "neither 0 nor 1"),
    ):
        assert read_tensors(file({"/0": row("F32", [2], 0, 8)}, bytes(8)))["/0"].tolist() == [0, 0]
        with pytest.raises(BadMessage, match=why):
            read_tensors(blob)


def entries_message(tree: object, **tensors: Tensor) -> WireMessage:
    blob = file_pieces({name.replace("at", "/"): value for name, value in tensors.items()})
    return WireMessage({"entries": tree, "extras": {"map": []}}, {"entries": blob} if tensors else {})


def named(**references: str) -> dict[str, object]:
    return {"map": [[{"value": name}, {"tensor": reference}] for name, reference in references.items()]}


def test_entries_that_do_not_fit_their_file_are_refused() -> None:
    for tree, why in (
        (None, "entries cannot be decoded"),
        ({"map": []}, "its entries do not use 1 of its tensors"),
        (named(w="/1"), "entries cannot be decoded"),
        (named(w="/0", v="/0"), "entries cannot be decoded"),
        (named(w="complex/0"), "entries cannot be decoded"),
        ({"list": [{"tensor": "/0"}]}, "entries are not a table"),
        ({"map": [[{"value": "w"}, {"list": [{"tensor": "/0"}]}]]}, "not named tensors"),
        ({"map": [[{"value": 3}, {"tensor": "/0"}]]}, "not named tensors"),
        ({"map": [[{"value": "w"}, {"tensor": "/0"}], [{"value": "v"}, {"value": 1.0}]]}, "not named tensors"),
    ):
        assert list(payload_of(entries_message(named(w="/0"), at0=torch.zeros(3))).entries) == ["w"]
        with pytest.raises(BadMessage, match=why):
            payload_of(entries_message(tree, at0=torch.zeros(3)))


def test_extras_that_cannot_be_put_together_are_refused() -> None:
    for tree in (
        None,
        {"tensor": "/0"},
        {"map": 3},
        {"value": 1},
        {"list": []},
        {"map": [[{"list": []}, {"value": 1}]]},
        {"a": 1, "b": 2},
    ):
        with pytest.raises(BadMessage, match="extras"):
            payload_of(WireMessage({"entries": {"map": []}, "extras": tree}))


def test_messages_of_others_are_refused() -> None:
    for content in (
        RecordDict({}),
        RecordDict({"polyfed": ConfigRecord({"control": "[1]"})}),
        RecordDict({"polyfed": ConfigRecord({"control": "{"})}),
        RecordDict({"polyfed": ConfigRecord({"control": 4})}),
        RecordDict({"polyfed": ConfigRecord({"control": "{}"}), "entries": ArrayRecord({"a": Array(torch.ones(2).numpy())})}),
    ):
        with pytest.raises(BadMessage):
            wire_message_of(content)


def test_the_size_of_a_message_is_known_before_it_is_read() -> None:
    content = records_of([Encoder().encode(Payload({"w": torch.ones(1000)}), {"text": "x" * 500})])[0]
    assert 4500 < size_of(content) < 4700


def test_the_process_that_flower_starts_for_each_message_need_not_import_torch() -> None:
    code = "import sys, polyfed.flower.client_app, polyfed.flower.node.resident; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entries_keep_their_order_on_the_way() -> None:
    entries = {name: torch.zeros(1) for name in ("z", "a", "m")}
    content = records_of([Encoder().encode(Payload(entries), {})])[0]
    children = {child.object_id: child for child in content.children.values()}
    again = RecordDict.inflate(content.deflate(), children)
    assert list(payload_of(wire_message_of(again)).entries) == ["z", "a", "m"]
