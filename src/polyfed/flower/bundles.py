"""Bundles: the messages to many clients, or their answers, in one. A tensor that several of them hold is there once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.flower.wire_message import BadMessage, Block, WireMessage

BUNDLE, TENSORS = "bundle", "tensors"


def bundled(wire_messages: Sequence[WireMessage]) -> WireMessage:
    """One message that holds these."""
    places: dict[int, str] = {}
    tensors: dict[str, Block] = {}

    def place(block: Block) -> str:
        if id(block) not in places:
            places[id(block)] = str(len(places))
            tensors[places[id(block)]] = block
        return places[id(block)]

    parts = [
        [message.control, {group: {name: place(block) for name, block in named.items()} for group, named in message.blocks.items()}]
        for message in wire_messages
    ]
    return WireMessage({BUNDLE: parts}, {TENSORS: tensors})


def unbundled(wire_message: WireMessage) -> list[WireMessage]:
    """The messages that a bundle holds."""
    tensors: Mapping[str, Block] = wire_message.blocks.get(TENSORS, {})
    try:
        parts: Any = wire_message.control[BUNDLE]
        return [
            WireMessage(
                dict(control), {group: {name: tensors[at] for name, at in named.items()} for group, named in groups.items()}
            )
            for control, groups in parts
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"its bundle cannot be taken apart ({type(error).__name__}: {error})") from error
