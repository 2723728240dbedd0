"""Arrays and chunks that are copied less: the same ids and the same bytes as Flower's own."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.app.message import array as arrays
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from polyfed.core.rounds import Payload
from polyfed.flower.wire.codec import Encoder, payload_of
from polyfed.flower.wire.lean_objects import lean_arrays, pieces_of
from polyfed.flower.wire.message import WireMessage, receive, send
from polyfed.flower.wire.records import content_hash, records_of, size_of, wire_message_of

DATA = bytes(range(256)) * 8
CHUNK = 700


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small chunks; and Flower's own ways are back afterwards."""
    monkeypatch.setattr(arrays, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK)
    before = {name: ArrayChunk.__dict__[name] for name in ("deflate", "inflate")}
    of_array, of_record = Array.__dict__["inflate"], ArrayRecord.__dict__["inflate"]
    yield
    for name, value in before.items():
        setattr(ArrayChunk, name, value)
    Array.inflate, ArrayRecord.inflate = of_array, of_record
    if "object_id" in ArrayChunk.__dict__:
        del ArrayChunk.object_id


def contents(data: bytes) -> tuple[str, dict[str, bytes]]:
    """The id of an array, and what travels."""
    array = Array(dtype="uint8", shape=(len(data),), stype="raw", data=data)
    return array.object_id, {name: part.deflate() for name, part in get_all_nested_objects(array).items()}


def test_the_same_ids_and_bytes_travel_and_arrive() -> None:
    usual = contents(DATA)
    assert lean_arrays()
    lean = contents(DATA)
    assert lean == usual
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in lean[1].items())
    # 2048 bytes of a pattern of 256 in chunks of 700 are three chunks that differ.
    assert len(lean[1]) == 1 + 3
    array = inflate_object_from_contents(lean[0], lean[1])
    assert isinstance(array, Array)
    assert array.data == DATA and (array.dtype, array.shape, array.stype) == ("uint8", (2048,), "raw")


def test_chunks_that_are_equal_travel_once_and_arrive_as_often_as_they_were() -> None:
    lean_arrays()
    name, parts = contents(bytes(3 * CHUNK))
    assert len(parts) == 1 + 1
    array = inflate_object_from_contents(name, parts)
    assert isinstance(array, Array) and array.data == bytes(3 * CHUNK)


def test_a_whole_message_arrives_as_it_was_sent() -> None:
    lean_arrays()
    (content,) = records_of([Encoder().encode(Payload({"w": torch.arange(1000.0)}), {"round": 3})])
    parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    again = inflate_object_from_contents(content.object_id, parts)
    assert isinstance(again, RecordDict)
    wire_message = wire_message_of(again)
    assert wire_message.control["round"] == 3
    assert torch.equal(payload_of(wire_message).entries["w"], torch.arange(1000.0))


def test_an_array_is_joined_only_where_somebody_asks_for_its_bytes() -> None:
    lean_arrays()
    name, parts = contents(DATA)
    array = inflate_object_from_contents(name, parts)
    assert [len(piece) for piece in pieces_of(array)] == [CHUNK, CHUNK, 2048 - 2 * CHUNK]
    assert b"".join(pieces_of(array)) == DATA
    usual = RecordDict({"tensors": ArrayRecord({"0": Array(dtype="uint8", shape=(2048,), stype="raw", data=DATA)})})
    all_parts = {part_name: part.deflate() for part_name, part in get_all_nested_objects(usual).items()}
    content = inflate_object_from_contents(usual.object_id, all_parts)
    assert isinstance(content, RecordDict)
    assert content_hash(content) == content_hash(usual) and size_of(content) == size_of(usual) == 2048
    assert len(pieces_of(content["tensors"]["0"])) == 3, "hashing joins nothing"
    assert array.data == DATA and pieces_of(array) == [DATA]
    assert array.object_id == name, "and it can be sent on"


def test_a_message_that_is_passed_on_is_not_copied() -> None:
    sent = Encoder().encode(Payload({"w": torch.arange(9.0), "none": torch.empty(0), "n": torch.tensor([True])}), {})
    ends = socket.socketpair()
    with ends[0], ends[1]:
        send(ends[0], sent)
        got = receive(ends[1])
    (content,) = records_of([got])
    assert content["tensors"]["entries"].data is got.blobs["entries"][0]
    assert b"".join(sent.blobs["entries"]) == b"".join(got.blobs["entries"])
    assert torch.equal(payload_of(wire_message_of(content)).entries["w"], torch.arange(9.0))
    lean_arrays()
    (content,) = records_of([WireMessage({}, {"entries": [DATA]})])
    parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    arrived = inflate_object_from_contents(content.object_id, parts)
    assert isinstance(arrived, RecordDict)
    assert [len(piece) for piece in wire_message_of(arrived).blobs["entries"]] == [CHUNK, CHUNK, 2048 - 2 * CHUNK]


def test_ids_of_chunks_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lean_arrays()
    chunk = ArrayChunk(memoryview(DATA))
    name = chunk.object_id
    monkeypatch.setattr(hashlib, "sha256", lambda *_: pytest.fail("hashed again"))
    assert chunk.object_id == name


def test_what_is_no_chunk_or_lacks_chunks_is_refused() -> None:
    lean_arrays()
    content = ArrayChunk(memoryview(DATA)).deflate()
    with pytest.raises(ValueError, match="is not an ArrayChunk"):
        ArrayChunk.inflate(content.replace(b"ArrayChunk", b"Array", 1))
    with pytest.raises(ValueError, match="is not an ArrayChunk"):
        ArrayChunk.inflate(b"ArrayChunk  12")
    name, parts = contents(DATA)
    with pytest.raises(ValueError, match="chunks of an array do not match"):
        Array.inflate(parts[name], {})
    record = ArrayRecord({"0": Array(dtype="uint8", shape=(2048,), stype="raw", data=DATA)})
    for children in ({}, {record["0"].object_id: ArrayChunk(memoryview(DATA))}):
        with pytest.raises(ValueError, match="arrays of a record do not match"):
            ArrayRecord.inflate(record.deflate(), children)
