"""Wire messages: plain values and the bytes of safetensors files. Short-lived processes can import this without torch or Flower."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ACTION = "polyfed"  # name under which Flower finds the handler of polyfed messages
DESCRIBE = "polyfed_describe"
DECLINED = "declined"  # refusal kind of a node that chooses not to take part
PROTOCOL = 4  # format version; it must be the same at server and nodes
BUNDLE = "bundle"
LENGTH = 8
LONGEST_HEADER = 256 * 1024 * 1024

Blob: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
"""Bytes of a safetensors file in pieces. They are joined only to read the tensors, because joining doubles the memory."""


class BadMessage(Exception):
    """An invalid message."""


@dataclass(frozen=True)
class WireMessage:
    """``control`` contains JSON values (floats stay bit-identical), ``blobs`` the tensors."""

    control: Mapping[str, Any]
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(_length_of, self.blobs.values()))


def _length_of(blob: Blob) -> int:
    return sum(map(len, blob))


def refusal(problem: str, kind: str = "error") -> WireMessage:
    return WireMessage({"ok": False, "kind": kind, "problem": problem})


def read_control(text: object) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"its text is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise BadMessage("its text is not a JSON object")
    return found


def bundled(messages: Sequence[WireMessage]) -> WireMessage:
    """Combine several messages into one. A blob that they share is included once."""
    blobs = {id(blob): blob for message in messages for blob in message.blobs.values()}
    names = {key: str(number) for number, key in enumerate(blobs)}
    parts = [[message.control, {name: names[id(blob)] for name, blob in message.blobs.items()}] for message in messages]
    return WireMessage({BUNDLE: parts}, {names[key]: blob for key, blob in blobs.items()})


def unbundled(bundle: WireMessage) -> list[WireMessage]:
    try:
        return [
            WireMessage(dict(control), {name: bundle.blobs[place] for name, place in places.items()})
            for control, places in bundle.control[BUNDLE]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"its bundle cannot be split ({type(error).__name__}: {error})") from error


def send(connection: socket.socket, message: WireMessage) -> None:
    lengths = {name: _length_of(blob) for name, blob in message.blobs.items()}
    header = json.dumps({"control": message.control, "blobs": lengths}).encode()
    connection.sendall(len(header).to_bytes(LENGTH, "little") + header)
    for blob in message.blobs.values():
        for piece in blob:
            connection.sendall(piece)


def receive(connection: socket.socket) -> WireMessage:
    """Read a wire message from a socket; each blob becomes one piece."""
    length = int.from_bytes(_exactly(connection, LENGTH), "little")
    if length > LONGEST_HEADER:
        raise BadMessage(f"its header has {length} bytes")
    header = read_control(_exactly(connection, length).decode())
    return WireMessage(header["control"], {name: [_exactly(connection, count)] for name, count in header["blobs"].items()})


def _exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if not got:
            raise ConnectionResetError("the connection closed in the middle of a message")
        filled += got
    return buffer
