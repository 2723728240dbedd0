"""Packs the tensors of messages into a few arrays, since Flower fetches every array by requests of its own.

Tensors that go to the same receivers share an array, so that what goes to all nodes is sent to the SuperLink once. The layout says
which tensor lies where. Like ``wire_message.py`` it knows neither torch nor Flower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.flower.wire_message import BadMessage, Block, Pieces, WireMessage


@dataclass
class Packed:
    """The blocks of one message by the array they lie in, and a row for each: group, name, type, shape, bytes, array."""

    layout: list[list[Any]] = field(default_factory=list)
    arrays: dict[str, list[Block]] = field(default_factory=dict)


def packed(wire_messages: Sequence[WireMessage]) -> list[Packed]:
    """Messages that are sent together, packed: one array for each set of receivers that a message shares tensors with."""
    receivers: dict[int, list[int]] = {}
    for number, message in enumerate(wire_messages):
        for block in {id(block): block for group in message.blocks.values() for block in group.values()}.values():
            receivers.setdefault(id(block), []).append(number)
    return [_packed_one(message, {block: tuple(numbers) for block, numbers in receivers.items()}) for message in wire_messages]


def _packed_one(wire_message: WireMessage, receivers: Mapping[int, tuple[int, ...]]) -> Packed:
    found, names = Packed(), dict[tuple[int, ...], str]()
    for group, named in wire_message.blocks.items():
        for name, block in named.items():
            array = names.setdefault(receivers[id(block)], str(len(names)))
            found.arrays.setdefault(array, []).append(block)
            found.layout.append([group, name, block.dtype, list(block.shape), len(block.data), array])
    return found


def unpacked(layout: object, arrays: Mapping[str, bytes | Pieces]) -> dict[str, dict[str, Block]]:
    """The blocks in arrays, by group and name. The rows of a layout must cover every array exactly, so nothing is there twice."""
    if not isinstance(layout, list):
        raise BadMessage("it does not say where its tensors lie")
    blocks: dict[str, dict[str, Block]] = {}
    ends = dict.fromkeys(arrays, 0)
    for row in layout:
        group, name, dtype, shape, length, array = _checked(row)
        if array not in ends or name in blocks.setdefault(group, {}):
            raise BadMessage(f"its tensor {name[:80]!r} is there twice or nowhere")
        begin, ends[array] = ends[array], ends[array] + length
        if ends[array] > len(arrays[array]):
            raise BadMessage(f"its tensor {name[:80]!r} ends behind the end of its array")
        blocks[group][name] = Block(dtype, tuple(shape), _between(arrays[array], begin, ends[array]))
    if any(ends[name] != len(data) for name, data in arrays.items()):
        raise BadMessage("an array holds more bytes than its tensors")
    return blocks


def _between(data: bytes | Pieces, begin: int, end: int) -> memoryview | Pieces:
    return data.between(begin, end) if isinstance(data, Pieces) else memoryview(data)[begin:end]


def _checked(row: object) -> tuple[str, str, str, list[Any], int, str]:
    match row:
        case [str(group), str(name), str(dtype), [*shape], int(length), str(array)] if length >= 0 and type(length) is int:
            return group, name, dtype, shape, length, array
    raise BadMessage("a row of its layout is not group, name, type, shape, bytes and array")
