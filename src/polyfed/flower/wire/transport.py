"""The transport sends wire messages to nodes over Flower's Grid and waits for their answers, one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from polyfed.flower.wire.message import ACTION, BadMessage, WireMessage
from polyfed.flower.wire.records import records_of

SHORTEST_PAUSE, LONGEST_PAUSE, SHARE = 0.05, 1.0, 0.05
"""Seconds between two looks for an answer, each a request to the SuperLink: a share of the time waited so far, within bounds."""
GRACE = 60.0
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What Flower raises while it puts a message together whose parts a node wrote; none of them is an error of the network."""


@dataclass(frozen=True)
class Sent:
    """A message that was sent to a node; empty ``id``: it could not be sent."""

    id: str
    node: int
    deadline: float


class Transport:
    """Sends and waits. Answers wait at the SuperLink until they are fetched, so only one at a time is in memory here."""

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
        """Raise when no answer can come any more."""

    def wait(self, sent: Sent) -> Message | None:
        """The answer to a message; None when there is none in time; ``BadMessage`` when it cannot be put together."""
        begin = time.monotonic()
        while sent.id:
            self.check()
            for message in self.pulled(sent.id):
                if message.metadata.reply_to_message_id == sent.id:
                    return message
            if (now := time.monotonic()) >= sent.deadline:
                return None
            time.sleep(min(max(SHORTEST_PAUSE, SHARE * (now - begin)), LONGEST_PAUSE))
        return None

    def pulled(self, message_id: str) -> Iterable[Message]:
        try:
            found: Iterable[Message] = self.grid.pull_messages([message_id])
        except MALFORMED as error:
            raise BadMessage(f"its answer cannot be put together ({type(error).__name__})") from error
        return found
