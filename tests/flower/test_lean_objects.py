"""Array chunks that are hashed once and not copied: the same ids and the same bytes as Flower's own."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app.message import arraychunk
from flwr.supercore.inflatable import inflatable_object

from polyfed.flower.lean_objects import lean_chunks

DATA = bytes(range(256)) * 8


def test_chunks_have_the_same_ids_and_bytes_and_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards.
    monkeypatch.setattr(arraychunk, "get_object_body", arraychunk.get_object_body)
    monkeypatch.setattr(arraychunk.ArrayChunk, "is_dirty", arraychunk.ArrayChunk.is_dirty, raising=False)
    chunk = arraychunk.ArrayChunk(memoryview(DATA))
    content, name = chunk.deflate(), chunk.object_id
    hashed: list[bytes] = []
    monkeypatch.setattr(inflatable_object, "get_object_id", lambda content: (hashed.append(content), name)[1])
    assert lean_chunks()
    lean = arraychunk.ArrayChunk(memoryview(DATA))
    assert [lean.object_id for _ in range(3)] == [name] * 3 and hashed == [content]
    assert bytes(arraychunk.ArrayChunk.inflate(content).data) == DATA
    with pytest.raises(ValueError, match="ArrayChunk was expected"):
        arraychunk.ArrayChunk.inflate(content.replace(b"ArrayChunk", b"Array", 1))
    with pytest.raises(ValueError, match="ArrayChunk was expected"):
        arraychunk.ArrayChunk.inflate(b"ArrayChunk  12")
