"""Payloads as wire messages and back, exact to the bit: entries by their names, extras as a tree of plain values, with their tensors as blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.conversation import Payload
from polyfed.core.trees import flattened, rebuilt
from polyfed.flower.wire_message import BadMessage, Block, Pieces, WireMessage

ENTRIES, EXTRAS = "entries", "extras"
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    + (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


class Encoder:
    """Turns payloads into wire messages; a tensor that several payloads share is encoded once."""

    def __init__(self) -> None:
        # The tensor is stored with its block, so that its id stays its own.
        self.done: dict[int, tuple[Tensor, Block]] = {}

    def encode(self, payload: Payload, control: Mapping[str, Any]) -> WireMessage:
        """The wire message of a payload and of further plain values."""
        tree, tensors = flattened(dict(payload.extras))
        entries = {name: self.block(value) for name, value in payload.entries.items()}
        extras = {name: self.block(value) for name, value in tensors.items()}
        return WireMessage({**control, EXTRAS: tree}, {ENTRIES: entries, EXTRAS: extras})

    def block(self, value: Tensor) -> Block:
        """The bytes of a tensor."""
        if id(value) not in self.done:
            self.done[id(value)] = (value, block_of(value))
        return self.done[id(value)][1]


def block_of(value: Tensor) -> Block:
    """A tensor as bytes."""
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"Tensors of type {value.dtype} cannot be sent. Types that can: {', '.join(DTYPES)}.")
    _require_little_endian()
    flat = value.detach().cpu().contiguous().reshape(-1)
    # No copy: the block is joined with others, or written to a socket, before anybody changes the tensor.
    return Block(name, tuple(value.shape), flat.view(torch.uint8).numpy().data)


def tensor_of(block: Block) -> Tensor:
    """The tensor that a block holds; a block that does not fit its own shape is refused."""
    dtype = DTYPES.get(block.dtype)
    if dtype is None:
        raise BadMessage(f"there is no type {block.dtype!r}")
    if any(not isinstance(side, int) or side < 0 for side in block.shape):
        raise BadMessage(f"{block.shape} is no shape")
    if math.prod(block.shape) * dtype.itemsize != len(block.data):
        raise BadMessage(f"{len(block.data)} bytes do not make the shape {block.shape} of {block.dtype}")
    _require_little_endian()
    if not len(block.data):
        return torch.empty(block.shape, dtype=dtype)
    # What came over a socket is a buffer of its own; what lies in a message is shared and must not be written to.
    raw = torch.frombuffer(own_buffer(block.data), dtype=torch.uint8)
    if dtype is torch.bool and bool((raw > 1).any()):
        raise BadMessage("a truth value is neither 0 nor 1")
    return raw.view(dtype).reshape(block.shape)


def own_buffer(data: bytes | bytearray | memoryview | Pieces) -> bytearray:
    """The bytes in a buffer that may be written to."""
    if isinstance(data, Pieces):
        return data.joined()
    return data if isinstance(data, bytearray) else bytearray(data)


def payload_of(wire_message: WireMessage) -> Payload:
    """The payload that a wire message holds."""
    entries = {name: tensor_of(block) for name, block in wire_message.blocks.get(ENTRIES, {}).items()}
    return Payload(entries, extras_of(wire_message))


def extras_of(wire_message: WireMessage) -> dict[str, Any]:
    """The extras that a wire message holds."""
    tensors = {name: tensor_of(block) for name, block in wire_message.blocks.get(EXTRAS, {}).items()}
    try:
        extras = rebuilt(wire_message.control[EXTRAS], tensors)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"its extras cannot be put together ({type(error).__name__}: {error})") from error
    if not isinstance(extras, dict):
        raise BadMessage("its extras are no table")
    return extras


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise BadMessage("machines that store the high byte first are not supported")
