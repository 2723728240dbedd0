"""A wire message: the content of one message, as plain values and named blocks of bytes.

It knows neither torch nor Flower, so the short-lived process that Flower starts for each message can pass wire messages on without
importing more than it must.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ACTION = "polyfed"
"""The name by which Flower finds the handler of our messages."""
DESCRIBE = "polyfed_describe"
DECLINED = "declined"
"""The kind of a refusal: the node takes no part, for a reason of its own."""
PROTOCOL = 3
"""The form of messages. 1 sent every tensor as an array of its own; 2 packs them, and both ends tell their versions."""
LENGTH = 8
LONGEST_HEADER = 256 * 1024 * 1024


class BadMessage(Exception):
    """A message that cannot be understood."""


class Pieces:
    """Bytes that arrived in pieces. They are passed on as they are: to join them would take as much memory again, which the kernel has to clear."""

    def __init__(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self.pieces = [memoryview(piece) for piece in pieces if len(piece)]
        self.length = sum(map(len, self.pieces))

    def __len__(self) -> int:
        return self.length

    def between(self, begin: int, end: int) -> Pieces:
        """The bytes from one place to another."""
        found, place = [], 0
        for piece in self.pieces:
            found.append(piece[max(0, begin - place) : max(0, end - place)])
            place += len(piece)
        return Pieces(found)

    def joined(self) -> bytearray:
        """The bytes in one buffer of its own."""
        buffer, place = bytearray(self.length), 0
        for piece in self.pieces:
            buffer[place : place + len(piece)] = piece
            place += len(piece)
        return buffer


@dataclass(frozen=True)
class Block:
    """The bytes of one tensor, little-endian, with what is needed to make it again."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview | Pieces


@dataclass(frozen=True)
class WireMessage:
    """``control`` holds plain values (JSON); ``blocks`` holds tensors by group and name."""

    control: Mapping[str, Any]
    blocks: Mapping[str, Mapping[str, Block]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(len(block.data) for group in self.blocks.values() for block in group.values())


def refusal(problem: str, kind: str = "error") -> WireMessage:
    """The answer of a node that cannot answer."""
    return WireMessage({"ok": False, "kind": kind, "problem": problem})


def text_of(values: Mapping[str, Any] | list[Any]) -> str:
    """Plain values as text; floats come back to the bit."""
    return json.dumps(values)


def value_of(text: object) -> object:
    """Plain values from text; None where there is no text."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"its text is no JSON ({error})") from error


def control_of(text: object) -> dict[str, Any]:
    """A table of plain values from text."""
    found = value_of(text)
    if not isinstance(found, dict):
        raise BadMessage("it has no table of plain values")
    return found


def send(connection: socket.socket, wire_message: WireMessage) -> None:
    """Write a wire message to a socket."""
    blocks = {
        group: {name: [block.dtype, list(block.shape), len(block.data)] for name, block in named.items()}
        for group, named in wire_message.blocks.items()
    }
    header = json.dumps({"control": text_of(wire_message.control), "blocks": blocks}).encode()
    connection.sendall(len(header).to_bytes(LENGTH, "little") + header)
    for named in wire_message.blocks.values():
        for block in named.values():
            for piece in block.data.pieces if isinstance(block.data, Pieces) else (block.data,):
                connection.sendall(piece)


def receive(connection: socket.socket, together: bool = False) -> WireMessage:
    """Read a wire message from a socket.

    Args:
        connection: the socket.
        together: whether all blocks lie in one buffer, in their order, as who sends them on needs them; else each has its own.
    """
    length = int.from_bytes(_exactly(connection, LENGTH), "little")
    if length > LONGEST_HEADER:
        raise BadMessage(f"its header would be {length} bytes long")
    header = control_of(_exactly(connection, length).decode())
    lengths = [length for heads in header["blocks"].values() for _, _, length in heads.values()]
    data = _in_one(connection, lengths) if together else _one_by_one(connection, lengths)
    blocks = {
        group: {name: Block(dtype, tuple(shape), next(data)) for name, (dtype, shape, _) in heads.items()}
        for group, heads in header["blocks"].items()
    }
    return WireMessage(control_of(header["control"]), blocks)


def _one_by_one(connection: socket.socket, lengths: Sequence[int]) -> Iterator[bytearray | memoryview]:
    for length in lengths:
        yield _exactly(connection, length)


def _in_one(connection: socket.socket, lengths: Sequence[int]) -> Iterator[bytearray | memoryview]:
    buffer, place = _exactly(connection, sum(lengths)), 0
    for length in lengths:
        yield memoryview(buffer)[place : place + length]
        place += length


def _exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if not got:
            raise ConnectionResetError("the other side ended in the middle of a message")
        filled += got
    return buffer
