"""A wire message: plain values, and the bytes of safetensors files. It can be bundled with others and sent over a socket.

This module knows neither torch nor Flower, so the short-lived process that Flower starts for each message passes wire messages on
without importing more than it must. ``codec.py`` knows what the bytes mean, ``records.py`` how Flower carries them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ACTION = "polyfed"
"""The name by which Flower finds the handler of our messages."""
DESCRIBE = "polyfed_describe"
DECLINED = "declined"
"""The kind of a refusal: the node takes no part, for a reason of its own."""
PROTOCOL = 4
"""The version of this format; server and nodes must have the same."""
BUNDLE = "bundle"
LENGTH = 8
LONGEST_HEADER = 256 * 1024 * 1024

Blob: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
"""The bytes of a safetensors file, in the pieces in which they were made or arrived. Only who reads the tensors joins them: that takes as
much memory again, which the kernel has to clear."""


class BadMessage(Exception):
    """A message that cannot be understood."""


@dataclass(frozen=True)
class WireMessage:
    """``control`` holds plain values (JSON; floats come back bit-identical), ``blobs`` tensors."""

    control: Mapping[str, Any]
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(_length_of, self.blobs.values()))


def _length_of(blob: Blob) -> int:
    return sum(map(len, blob))


def refusal(problem: str, kind: str = "error") -> WireMessage:
    """The answer of a node that cannot answer."""
    return WireMessage({"ok": False, "kind": kind, "problem": problem})


def read_control(text: object) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"its text is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise BadMessage("it has no table of plain values")
    return found


# ------------------------------------------------------------------------------------------------------------- bundles
def bundled(messages: Sequence[WireMessage]) -> WireMessage:
    """Put the messages to many clients, or their answers, into one. A blob that several of them share is in it once."""
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
        raise BadMessage(f"its bundle cannot be taken apart ({type(error).__name__}: {error})") from error


# ------------------------------------------------------------------------------------------------------------- sockets
def send(connection: socket.socket, message: WireMessage) -> None:
    lengths = {name: _length_of(blob) for name, blob in message.blobs.items()}
    header = json.dumps({"control": message.control, "blobs": lengths}).encode()
    connection.sendall(len(header).to_bytes(LENGTH, "little") + header)
    for blob in message.blobs.values():
        for piece in blob:
            connection.sendall(piece)


def receive(connection: socket.socket) -> WireMessage:
    """Read a wire message from a socket; each blob arrives in one piece."""
    length = int.from_bytes(_exactly(connection, LENGTH), "little")
    if length > LONGEST_HEADER:
        raise BadMessage(f"its header would be {length} bytes long")
    header = read_control(_exactly(connection, length).decode())
    return WireMessage(header["control"], {name: [_exactly(connection, count)] for name, count in header["blobs"].items()})


def _exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if not got:
            raise ConnectionResetError("the other side ended in the middle of a message")
        filled += got
    return buffer
