"""Wire messages as Flower's records and back: an ArrayRecord for each group of tensors, a ConfigRecord for the rest."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.flower.wire_message import BadMessage, Block, WireMessage, control_of, text_of

CONTROL, TEXT = "polyfed", "control"
RAW = "polyfed.raw"


class Arrays:
    """Turns blocks into Flower's arrays; a block that several messages share is turned, cut and hashed once."""

    def __init__(self) -> None:
        self.done: dict[int, tuple[Block, Array]] = {}

    def records(self, wire_message: WireMessage) -> RecordDict:
        """A wire message as the content of a Flower message."""
        content = RecordDict({CONTROL: ConfigRecord({TEXT: text_of(wire_message.control)})})
        for group, named in wire_message.blocks.items():
            record = ArrayRecord()
            # One by one: the constructor would copy the arrays, and each copy would be cut and hashed again.
            for name, block in named.items():
                record[name] = self.array(block)
            content[group] = record
        return content

    def array(self, block: Block) -> Array:
        """A block as one of Flower's arrays."""
        if id(block) not in self.done:
            array = Array(dtype=block.dtype, shape=block.shape, stype=RAW, data=block.data)
            self.done[id(block)] = (block, array)
        return self.done[id(block)][1]


def wire_message_of(content: RecordDict) -> WireMessage:
    """The wire message in the content of a Flower message."""
    control = content.get(CONTROL)
    if not isinstance(control, ConfigRecord):
        raise BadMessage("it was not written by polyfed")
    blocks = {
        str(group): {str(name): _block(array) for name, array in record.items()}
        for group, record in content.items()
        if isinstance(record, ArrayRecord)
    }
    return WireMessage(control_of(control.get(TEXT)), blocks)


def size_of(content: RecordDict) -> int:
    """Bytes of a message's content."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    texts = sum(
        len(value) for record in content.config_records.values() for value in record.values() if isinstance(value, str | bytes)
    )
    return arrays + texts


def _block(array: Array) -> Block:
    if array.stype != RAW:
        raise BadMessage(f"an array is written as {array.stype!r}")
    return Block(array.dtype, tuple(array.shape), array.data)
