"""Send wire messages to nodes over Flower's Grid, and wait for their replies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from polyfed.flower.wire.message import ACTION, BadMessage, WireMessage
from polyfed.flower.wire.records import records_of

SHORTEST_PAUSE, LONGEST_PAUSE, FRACTION = (
    0.05,
    1.0,
    0.05,
)  # wait between polls: bounds in seconds, and fraction of the time waited so far
GRACE = 60.0
# Flower raises these when it assembles a malformed message from a node.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Sent:
    """A message to a node; ``id`` is empty if the SuperLink did not accept it."""

    id: str
    node: int
    deadline: float


class Transport:
    """Sends messages and fetches replies one by one, so that only one reply at a time is in memory here."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def send(self, wire_messages: Mapping[int, WireMessage], category: str, group: str, timeout: float) -> dict[int, Sent]:
        messages = {
            node: Message(content, node, f"{category}.{ACTION}", ttl=timeout + GRACE, group_id=group)
            for node, content in zip(wire_messages, records_of(list(wire_messages.values())), strict=True)
        }
        accepted = set(self.grid.push_messages(list(messages.values()))) if messages else set()
        deadline = time.monotonic() + timeout
        # The Grid sets the ids of messages when it sends them.
        ids = {node: str(message.metadata.message_id) for node, message in messages.items()}
        return {node: Sent(id if id in accepted else "", node, deadline) for node, id in ids.items()}

    def check(self) -> None:
        """Raise an error if no reply can arrive any more."""

    def wait(self, sent: Sent) -> Message | None:
        """Return the reply to a message, or None if it does not arrive in time."""
        start = time.monotonic()
        while sent.id:
            self.check()
            for message in self.pulled(sent.id):
                if message.metadata.reply_to_message_id == sent.id:
                    return message
            if (now := time.monotonic()) >= sent.deadline:
                return None
            time.sleep(min(max(SHORTEST_PAUSE, FRACTION * (now - start)), LONGEST_PAUSE))
        return None

    def pulled(self, message_id: str) -> Iterable[Message]:
        try:
            found: Iterable[Message] = self.grid.pull_messages([message_id])
        except MALFORMED as error:
            raise BadMessage(f"its reply is malformed ({type(error).__name__})") from error
        return found
