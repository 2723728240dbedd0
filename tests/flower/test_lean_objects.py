"""Arrays and chunks that are copied less: the same ids and the same bytes as Flower's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

import torch
from flwr.app import Array, RecordDict
from flwr.app.message import array as arrays
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from polyfed.core.conversation import Payload
from polyfed.flower.codec import Encoder, payload_of
from polyfed.flower.lean_objects import lean_arrays
from polyfed.flower.records import records_of, wire_message_of

DATA = bytes(range(256)) * 8
CHUNK = 700


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small chunks; and Flower's own ways are back afterwards."""
    monkeypatch.setattr(arrays, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK)
    before = {name: ArrayChunk.__dict__[name] for name in ("deflate", "inflate")}
    of_array = Array.__dict__["inflate"]
    yield
    for name, value in before.items():
        setattr(ArrayChunk, name, value)
    Array.inflate = of_array
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


def test_ids_of_chunks_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lean_arrays()
    chunk = ArrayChunk(memoryview(DATA))
    name = chunk.object_id
    monkeypatch.setattr(hashlib, "sha256", lambda *_: pytest.fail("hashed again"))
    assert chunk.object_id == name


def test_what_is_no_chunk_or_lacks_chunks_is_refused() -> None:
    lean_arrays()
    content = ArrayChunk(memoryview(DATA)).deflate()
    with pytest.raises(ValueError, match="ArrayChunk was expected"):
        ArrayChunk.inflate(content.replace(b"ArrayChunk", b"Array", 1))
    with pytest.raises(ValueError, match="ArrayChunk was expected"):
        ArrayChunk.inflate(b"ArrayChunk  12")
    name, parts = contents(DATA)
    with pytest.raises(ValueError, match="does not have the chunks"):
        Array.inflate(parts[name], {})
