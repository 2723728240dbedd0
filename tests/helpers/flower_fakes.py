"""A Grid without Flower's processes: messages are handed to nodes in this process, through the same records, codec and node code."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from polyfed.core.data_types import DataSet, Domain
from polyfed.data.registry import data_sets
from polyfed.flower.client_app import make_app
from polyfed.flower.node.node import build_node
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.server.federation import federation_of
from polyfed.flower.server.roster import Roster
from polyfed.flower.wire.descriptions import Description
from polyfed.flower.wire.message import WireMessage
from polyfed.flower.wire.transport import Transport
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import tiny_federation

TINY, TINY_MODEL = "flower_tiny", "polyfed.testing:TinyNet"
"""The name under which the tiny federation can be built by nodes; ``tiny_data`` makes it known for a while; and its model, which nodes may not name to the server."""


@contextlib.contextmanager
def tiny_data() -> Iterator[None]:
    def flower_tiny() -> DataSet:
        federation = tiny_federation({"big": 21, "middle": 14, "small": 9})
        parts = [Domain(c.id, c.train, c.tests[c.id], c.validation) for c in federation.clients]
        return DataSet("tiny", federation.classes, tuple(parts), default_model=TINY_MODEL, source="made here")

    data_sets.add(flower_tiny, TINY)
    try:
        yield
    finally:
        del data_sets._records[TINY]


Meddler = Callable[[Message, Message], Message | None]


@dataclass
class FakeGrid:
    """Nodes by number. ``meddle`` sees each message with its answer, and gives the answer that arrives (None: none does)."""

    settings: Settings
    home: Path
    configs: Mapping[int, Mapping[str, Any]]
    meddle: Meddler = lambda context, answered: answered
    offline: set[int] = field(default_factory=set)
    answers: dict[str, Message] = field(default_factory=dict)
    numbers: Iterable[int] = field(default_factory=itertools.count)
    asked: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self) -> list[int]:
        return [node for node in self.configs if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(iter(self.numbers))}"
            if message.metadata.dst_node_id in self.offline:
                continue
            ids.append(message.metadata.message_id)
            self.asked.append(message)
            answered = self.meddle(message, self.answer(message))
            if answered is not None:
                self.answers[message.metadata.message_id] = answered
        return ids

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(run_id=1, node_id=node, node_config=dict(self.configs[node]), state=RecordDict(), run_config={})
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    @property
    def app(self) -> ClientApp:
        def work(wire_message: WireMessage, context: Context) -> WireMessage:
            return build_node(self.settings, context.node_config, self.home / str(context.node_id)).answer(wire_message)

        return make_app(work)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answers.pop(name) for name in message_ids if name in self.answers]


def virtual_nodes(count: int) -> dict[int, dict[str, Any]]:
    """As Flower's simulation numbers its nodes; the numbers of nodes say nothing about their clients."""
    return {(node * 7919) % 104729 + 1: {"partition-id": node, "num-partitions": count} for node in range(count)}


def over(grid: FakeGrid, settings: Settings, timeout: float = 5.0, patience: float = 0.0) -> Experiment:
    """The experiment of these settings over a Grid, as the ServerApp builds it."""
    roster = Roster(Transport(grid), timeout=5.0, patience=patience)  # type: ignore[arg-type]
    federation = federation_of(roster.gather(len(grid.configs), 5.0))
    return Experiment(settings, federation, backend=lambda bench, clients: FlowerBackend(bench, clients, roster, timeout))


def described(client: str, domain: str, files: str = "") -> Description:
    """What a node says of itself: eight examples of two classes, five to test on."""
    return Description(
        client=client,
        domains=(domain,),
        name="toy",
        source=files,
        default_model="small_cnn",
        task="classification",
        classes=("0", "1"),
        class_counts=(4, 4),
        samples=8,
        input_shape=(3, 8, 8),
        input_type="uint8",
        mean=(0.5,),
        std=(0.5,),
        tests={domain: 5},
        validation=None,
    )
