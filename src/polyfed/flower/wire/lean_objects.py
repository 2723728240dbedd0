"""Handle Flower's arrays with fewer copies than Flower 1.41 makes.

Flower sends arrays in chunks of 5 MB. It copies and hashes each chunk two or three times per message, copies it twice more to send it and
once to receive it, and copies the whole array twice to join the chunks. Here the hash is cached, since chunks never change, a received
chunk is a view, and an array is joined in one copy, and only if its bytes are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

log = logging.getLogger("polyfed")

PIECES = "_polyfed_pieces"

LONGEST_HEAD = 256  # maximum bytes of a chunk's header, which contains its type and length


def lean_arrays() -> bool:
    """Patch Flower's array classes in this process. Return False if this Flower release differs."""
    try:
        from flwr.app.message.array import Array
        from flwr.app.message.arraychunk import ArrayChunk
        from flwr.app.message.arrayrecord import ArrayRecord
        from flwr.supercore.constant import HEAD_BODY_DIVIDER
        from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content
    except ImportError:
        log.info("This Flower release does not have the array chunks of 1.41, so they are not optimised.")
        return False

    class Arrived(Array):
        """An array that is joined from its chunks only when its bytes are read."""

        @property
        def data(self) -> bytes:
            if PIECES in self.__dict__:
                self.data = b"".join(self.__dict__[PIECES])
            return bytes(self.__dict__["_polyfed_data"])

        @data.setter
        def data(self, value: bytes) -> None:
            self.__dict__.pop(PIECES, None)
            self.__dict__["_polyfed_data"] = value

    # Flower sends the class name.
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
            raise ValueError(f"The object is not an {cls.__qualname__}.")
        return cls(memoryview(content)[len(first) + len(HEAD_BODY_DIVIDER) :])

    def array_arrived(cls: type[Array], content: bytes, children: Any = None) -> Array:
        header, ids = json.loads(get_object_body(content, cls)), get_object_children_ids_from_object_content(content)
        chunks = [ids[number] for number in header["arraychunk_ids"]]
        if set(chunks) != set(children or {}):
            raise ValueError("The chunks of an array do not match its list of chunks.")
        arrived = Arrived(dtype=header["dtype"], shape=tuple(header["shape"]), stype=header["stype"], data=b"")
        arrived.__dict__[PIECES] = [children[name].data for name in chunks]
        return arrived

    def record_arrived(cls: type[ArrayRecord], content: bytes, children: Any = None) -> ArrayRecord:
        names, arrays = json.loads(get_object_body(content, cls)), children or {}
        if set(names.values()) != set(arrays) or not all(isinstance(array, Array) for array in arrays.values()):
            raise ValueError("The arrays of a record do not match its list of arrays.")
        record = cls()
        # Assigned one by one, because the constructor would join the arrays.
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
    """Return the bytes of a Flower array, in the pieces in which they arrived."""
    pieces: list[Any] = array.__dict__.get(PIECES) or [array.data]
    return pieces
