"""Flower's arrays and their chunks without the copies that Flower 1.41 makes of them.

An array travels in chunks of 5 MB. Flower copies and hashes each chunk again whenever its id is asked for, two or three times a message,
copies it twice more when it is sent and once when it arrives, and joins chunks in two copies of the whole array. Chunks never change, so
their ids may be remembered, and a view of what arrived is enough; an array is joined in one copy, and only where somebody asks for that.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

log = logging.getLogger("polyfed")

PIECES = "_polyfed_pieces"

LONGEST_HEAD = 256
"""Bytes: a chunk has no children, so its head is its type and its length."""


def lean_arrays() -> bool:
    """Handle arrays in this process with fewer copies; False where this release of Flower has others."""
    try:
        from flwr.app.message.array import Array
        from flwr.app.message.arraychunk import ArrayChunk
        from flwr.app.message.arrayrecord import ArrayRecord
        from flwr.supercore.constant import HEAD_BODY_DIVIDER
        from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content
    except ImportError:
        log.info("This release of Flower has no array chunks as in 1.41: it handles them in its own way.")
        return False

    class Arrived(Array):
        """An array that is joined from its chunks only where somebody asks for its bytes."""

        @property
        def data(self) -> bytes:
            """All bytes."""
            if PIECES in self.__dict__:
                self.data = b"".join(self.__dict__[PIECES])
            return bytes(self.__dict__["_polyfed_data"])

        @data.setter
        def data(self, value: bytes) -> None:
            self.__dict__.pop(PIECES, None)
            self.__dict__["_polyfed_data"] = value

    # Flower writes the name of a class into what it sends.
    Arrived.__qualname__ = Array.__qualname__

    def head(chunk: ArrayChunk) -> bytes:
        return f"{ArrayChunk.__qualname__}  {len(chunk.data)}".encode() + bytes(HEAD_BODY_DIVIDER)

    def chunk_id(chunk: ArrayChunk) -> str:
        if "_object_id" not in chunk.__dict__:
            found = hashlib.sha256(head(chunk))
            found.update(chunk.data)
            chunk.__dict__["_object_id"] = found.hexdigest()
        return str(chunk.__dict__["_object_id"])

    def chunk_sent(chunk: ArrayChunk) -> bytes:
        return b"".join((head(chunk), chunk.data))

    def chunk_arrived(cls: type[ArrayChunk], content: bytes, children: Any = None) -> ArrayChunk:
        first, found, _ = bytes(memoryview(content)[:LONGEST_HEAD]).partition(HEAD_BODY_DIVIDER)
        if children or not found or first.split(b" ")[0] != cls.__qualname__.encode():
            raise ValueError(f"A {cls.__qualname__} was expected.")
        return cls(memoryview(content)[len(first) + len(HEAD_BODY_DIVIDER) :])

    def array_arrived(cls: type[Array], content: bytes, children: Any = None) -> Array:
        told, ids = json.loads(get_object_body(content, cls)), get_object_children_ids_from_object_content(content)
        chunks = [ids[number] for number in told["arraychunk_ids"]]
        if set(chunks) != set(children or {}):
            raise ValueError("An array does not have the chunks that it names.")
        arrived = Arrived(dtype=told["dtype"], shape=tuple(told["shape"]), stype=told["stype"], data=b"")
        arrived.__dict__[PIECES] = [children[name].data for name in chunks]
        return arrived

    def record_arrived(cls: type[ArrayRecord], content: bytes, children: Any = None) -> ArrayRecord:
        names, arrays = json.loads(get_object_body(content, cls)), children or {}
        if set(names.values()) != set(arrays) or not all(isinstance(array, Array) for array in arrays.values()):
            raise ValueError("A record does not have the arrays that it names.")
        record = cls()
        # One by one: the constructor would make arrays of its own, joined.
        for name, array in names.items():
            record[name] = arrays[array]
        return record

    changes = {"object_id": property(chunk_id), "deflate": chunk_sent, "inflate": classmethod(chunk_arrived)}
    for name, value in changes.items():
        setattr(ArrayChunk, name, value)
    Array.inflate = classmethod(array_arrived)
    ArrayRecord.inflate = classmethod(record_arrived)
    return True


def pieces_of(array: Any) -> list[Any]:
    """The bytes of an array of Flower's, in the pieces in which they arrived, or in one."""
    pieces: list[Any] = array.__dict__.get(PIECES) or [array.data]
    return pieces
