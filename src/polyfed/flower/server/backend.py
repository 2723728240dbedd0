"""The backend for Flower nodes, which stages and commits only the version and hash of the state on their disks."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import MessageType

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import EVALUATION, TRAINING, Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import DataError
from polyfed.extras import shown
from polyfed.flower.server.roster import Roster, read_reply, reason_in
from polyfed.flower.wire.codec import Encoder, payload_of
from polyfed.flower.wire.message import BadMessage, WireMessage
from polyfed.flower.wire.records import size_of
from polyfed.flower.wire.transport import Sent
from polyfed.runs.folder.client_state_files import version_name

log = logging.getLogger("polyfed")

CATEGORIES = {TRAINING: MessageType.TRAIN, EVALUATION: MessageType.EVALUATE}
DEFAULT_TIMEOUT = 3600.0
SPARE_BYTES = 64 * 1024 * 1024
TIMES_THE_MODEL = 4
RETAINED = 2
LARGEST_LOSS = 1e300


class FlowerBackend(StagingBackend):
    """A backend that sends requests to nodes, given placeholders for their data.

    A client may take ``timeout`` seconds to reply. With ``leaves_newcomer``, the run folder contains a newcomer model, from the layers that
    nodes send at the end.
    """

    remote = True

    def __init__(
        self,
        bench: Workbench,
        clients: Collection[ClientData],
        roster: Roster,
        timeout: float = DEFAULT_TIMEOUT,
        leaves_newcomer: bool = False,
    ) -> None:
        super().__init__(bench, clients)
        self.roster, self.timeout, self.leaves_newcomer = roster, timeout, leaves_newcomer
        self.new_run = uuid.uuid4().hex
        self.started = time.time_ns()
        self.number = 0
        self.reserved: dict[str, list[Mapping[str, ClientState]]] = {}
        counts = [bench.task.class_counts(client.train, bench.classes) for client in clients]
        self.facts = {
            "rounds": bench.settings.rounds,
            "class_counts": [sum(column) for column in zip(*counts, strict=True)],
            "mean": list(bench.preparation.mean),
            "std": list(bench.preparation.std),
        }

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        nodes = self.roster.present(clients, insist=request.attempt > 0)
        encoder = Encoder()
        messages = {node: self.message_for(encoder, request, client) for client, node in nodes.items()}
        model = sum(entry.size for entry in self.bench.plan.entries.values())
        # A larger reply is a mistake or an attack.
        bounds = {client: TIMES_THE_MODEL * (model + messages[node].size) + SPARE_BYTES for client, node in nodes.items()}
        versions = {client: str(messages[node].control["version"]) for client, node in nodes.items()}
        sent = self.roster.transport.send(
            messages, CATEGORIES.get(request.purpose, MessageType.QUERY), str(request.round), self.timeout
        )
        del messages, encoder
        for client, node in nodes.items():
            yield self.read(sent[node], client, versions[client], bounds[client])

    def message_for(self, encoder: Encoder, request: Request, client: str) -> WireMessage:
        self.number, bench = self.number + 1, self.bench
        start = self.current_state(client).memory
        control = {
            "client": client,
            "what": request.what,
            "purpose": request.purpose,
            "round": request.round,
            "attempt": request.attempt,
            "run": self.run,
            "start": {"version": start["version"], "digest": start["digest"]} if start else None,
            "version": version_name(self.started, self.number, request.round, request.attempt),
            "needed": self.needed(client),
            "facts": self.facts | ({"measure": bench.measure} if bench.measure != bench.task.main_measure else {}),
        }
        return encoder.encode(request.payloads[client], control)

    def read(self, sent: Sent, client: str, version: str, bound: int) -> Outcome:
        """Wait for the reply of one client. A bad reply excludes only this client."""
        try:
            message = self.roster.transport.wait(sent)
            if message is not None and message.has_content() and (size := size_of(message.content)) > bound:
                raise BadMessage(f"its reply has {size} bytes, but at most {bound} were expected")
            return self.outcome(read_reply(message, sent.node, self.timeout), client, version)
        except BadMessage as error:
            return Outcome(client, None, ClientState(), problem=f"{error}.")

    def outcome(self, reply: WireMessage, client: str, version: str) -> Outcome:
        if not reply.control.get("ok"):
            return self.refused(client, reply.control)
        try:
            payload = payload_of(reply)
            loss, mark = loss_in(reply.control), self.mark(reply.control, version)
            validation = _validation_in(reply.control, self.bench.task.min_main)
        except BadMessage as error:
            return Outcome(client, None, ClientState(), problem=f"{error}.")
        if reply.control.get("restarted"):
            log.warning("Client %s lost its local state and starts over.", client)
        return Outcome(client, payload, mark, loss, validation=validation)

    def refused(self, client: str, control: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a client that declined; one node does not end the run of the others."""
        return Outcome(client, None, ClientState(), problem=reason_in(control.get("problem")))

    def mark(self, control: Mapping[str, Any], version: str) -> ClientState:
        """Return the version and hash that the server stores instead of a client's state."""
        if control.get("version") is None:
            return ClientState()
        if control["version"] != version or not isinstance(control.get("digest"), str):
            raise BadMessage("it reports another version of its state than the server assigned")
        return ClientState(memory={"run": self.run, "version": version, "digest": control["digest"]})

    @property
    def run(self) -> str:
        """The run id at the nodes; a resumed run uses the one in its checkpoint."""
        known = next((state.memory["run"] for state in self.client_states.values() if state.memory), None)
        return self.new_run if known is None else str(known)

    def needed(self, client: str) -> list[str]:
        """Return the versions that this client must not remove."""
        states = [self.client_states, self.staged, *(state for states in self.reserved.values() for state in states)]
        marks = [state[client].memory for state in states if client in state]
        return sorted({str(mark["version"]) for mark in marks if mark})

    def retain(self, name: str, states: Mapping[str, ClientState] | None = None) -> None:
        retained = self.reserved.setdefault(name, [])
        retained.append(dict(self.client_states if states is None else states))
        del retained[:-RETAINED]

    def can_read(self, client: str) -> bool:
        return client not in self.client_states

    def state_of(self, client: str) -> ClientState:
        if not self.can_read(client):
            raise DataError(f"The local state of client {client} stays on its machine, so its model cannot be assembled here.")
        return ClientState()

    def client_digests(self) -> dict[str, str]:
        return {client: str(state.memory["digest"]) for client, state in self.client_states.items() if state.memory}


def _validation_in(control: Mapping[str, Any], minimum: float) -> float | None:
    value = control.get("validation")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= 1):
        raise BadMessage(f"its validation score is {shown(value)}, expected a number from {minimum:g} to 1")
    return None if value is None else float(value)


def loss_in(control: Mapping[str, Any]) -> float | None:
    loss = control.get("loss")
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise BadMessage(f"its loss is a {type(loss).__name__}, not a number")
    if loss is not None and not -LARGEST_LOSS <= loss <= LARGEST_LOSS:
        raise BadMessage(f"its loss is {shown(loss)}, expected at most {LARGEST_LOSS:g} in magnitude")
    return None if loss is None else float(loss)
