"""Wire messages as Flower's records and back: one ArrayRecord for the packed tensors, a ConfigRecord for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.flower.lean_objects import pieces_of
from polyfed.flower.packing import packed, unpacked
from polyfed.flower.wire_message import BadMessage, Block, Pieces, WireMessage, control_of, text_of, value_of

CONTROL, TEXT, LAYOUT, TENSORS = "polyfed", "control", "layout", "tensors"
RAW, BYTES = "polyfed.packed", "uint8"


def records_of(wire_messages: Sequence[WireMessage]) -> list[RecordDict]:
    """Wire messages that are sent together as contents of Flower messages; an array that several share is joined, cut and hashed once."""
    arrays = _Arrays()
    contents = []
    for wire_message, parts in zip(wire_messages, packed(wire_messages), strict=True):
        control = ConfigRecord({TEXT: text_of(wire_message.control), LAYOUT: text_of(parts.layout)})
        content = RecordDict({CONTROL: control})
        if parts.arrays:
            content[TENSORS] = record = ArrayRecord()
            # One by one: the constructor would copy the arrays, and each copy would be cut and hashed again.
            for name, blocks in parts.arrays.items():
                record[name] = arrays.array(blocks)
        contents.append(content)
    return contents


class _Arrays:
    """Joins blocks into Flower's arrays; the same blocks become the same array."""

    def __init__(self) -> None:
        self.done: dict[tuple[int, ...], Array] = {}

    def array(self, blocks: Sequence[Block]) -> Array:
        key = tuple(map(id, blocks))
        if key not in self.done:
            data = in_one_buffer(blocks)
            self.done[key] = Array(dtype=BYTES, shape=(len(data),), stype=RAW, data=b"")
            self.done[key].data = data
        return self.done[key]


def in_one_buffer(blocks: Sequence[Block]) -> bytes | bytearray:
    """The bytes of all blocks; where they are all of one buffer, one behind the other, that buffer itself."""
    full = [block.data for block in blocks if len(block.data)]
    base = full[0].obj if full and isinstance(full[0], memoryview) else None
    if isinstance(base, bytearray) and sum(map(len, full)) == len(base):
        place = address_of(base)
        for data in full:
            if not isinstance(data, memoryview) or data.obj is not base or address_of(data) != place:
                break
            place += len(data)
        else:
            return base
    return b"".join(data.joined() if isinstance(data, Pieces) else data for data in full)


def address_of(data: bytearray | memoryview) -> int:
    """Where a buffer begins in memory."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def wire_message_of(content: RecordDict) -> WireMessage:
    """The wire message in the content of a Flower message."""
    control = content.get(CONTROL)
    if not isinstance(control, ConfigRecord):
        raise BadMessage("it was not written by polyfed")
    arrays = {
        str(name): _data(array) for record in content.values() if isinstance(record, ArrayRecord) for name, array in record.items()
    }
    return WireMessage(control_of(control.get(TEXT)), unpacked(value_of(control.get(LAYOUT)), arrays))


def size_of(content: RecordDict) -> int:
    """Bytes of a message's content."""
    arrays = sum(len(piece) for record in content.array_records.values() for array in record.values() for piece in pieces_of(array))
    texts = sum(
        len(value) for record in content.config_records.values() for value in record.values() if isinstance(value, str | bytes)
    )
    return arrays + texts


def _data(array: Array) -> bytes | Pieces:
    if array.stype != RAW:
        raise BadMessage(f"an array is written as {array.stype!r}")
    pieces = pieces_of(array)
    return array.data if len(pieces) == 1 and isinstance(array.data, bytes) else Pieces(pieces)
