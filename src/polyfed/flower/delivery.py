"""Deliver over Flower's Grid: the same loop and the same methods, with clients that are nodes on other machines.

What clients keep stays on their disks (``node_state.py``). The server knows of each client which version of it counts, and its hash:
these markers are staged, committed and checkpointed in the place of the state itself.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Message, MessageType

from polyfed.client import Kept, Workbench
from polyfed.conversation import EVALUATION, TRAINING, Ask
from polyfed.data.federation import ClientData
from polyfed.errors import DataError, NotFinite
from polyfed.flower.codec import Encoder, payload_of
from polyfed.flower.node_state import version_name
from polyfed.flower.parcel import BadParcel, Parcel
from polyfed.flower.records import size_of
from polyfed.flower.roster import Roster, opened
from polyfed.simulate.in_process import InProcess, Outcome

log = logging.getLogger("polyfed")

CATEGORIES = {TRAINING: MessageType.TRAIN, EVALUATION: MessageType.EVALUATE}
USUAL_TIMEOUT = 3600.0
SPARE_BYTES = 64 * 1024 * 1024
TIMES_THE_MODEL = 4
HELD = 2


class GridDelivery(InProcess):
    """A delivery whose clients are nodes.

    Args:
        bench: the server's own, which knows plan and settings.
        clients: stand-ins for the nodes' data.
        roster: which node is which client.
        timeout: seconds a client may take to answer.
        leaves_newcomer: whether the run folder is left the newcomer's model, made from what the nodes tell at the end.
    """

    remote = True

    def __init__(
        self,
        bench: Workbench,
        clients: Collection[ClientData],
        roster: Roster,
        timeout: float = USUAL_TIMEOUT,
        leaves_newcomer: bool = False,
    ) -> None:
        super().__init__(bench, clients)
        self.roster, self.timeout, self.leaves_newcomer = roster, timeout, leaves_newcomer
        self.new_run = uuid.uuid4().hex
        self.begun = time.time_ns()
        self.number = 0
        self.reserved: dict[str, list[Mapping[str, Kept]]] = {}
        counts = [torch.bincount(client.train.labels, minlength=bench.classes) for client in clients]
        self.facts = {"rounds": bench.settings.rounds, "class_counts": torch.stack(counts).sum(0).tolist()}

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        nodes = self.roster.present(clients, insist=ask.attempt > 0)
        encoder = Encoder()
        parcels = {node: self.parcel(encoder, ask, client) for client, node in nodes.items()}
        bounds = {client: self.largest_answer(parcels[node].size) for client, node in nodes.items()}
        versions = {client: str(parcels[node].control["version"]) for client, node in nodes.items()}
        sent = self.roster.post.send(parcels, CATEGORIES.get(ask.purpose, MessageType.QUERY), str(ask.round), self.timeout)
        del parcels, encoder
        for client, node in nodes.items():
            message = self.roster.post.wait(sent[node])
            yield self.read(message, client, node, versions[client], bounds[client])

    def parcel(self, encoder: Encoder, ask: Ask, client: str) -> Parcel:
        """The message of an ask to one client."""
        self.number += 1
        start = self.held(client).memory
        control = {
            "client": client,
            "what": ask.what,
            "purpose": ask.purpose,
            "round": ask.round,
            "attempt": ask.attempt,
            "run": self.run,
            "start": {"version": start["version"], "digest": start["digest"]} if start else None,
            "version": version_name(self.begun, self.number, ask.round, ask.attempt),
            "needed": self.needed(client),
            "facts": self.facts,
        }
        return encoder.parcel(ask.payloads[client], control)

    def read(self, message: Message | None, client: str, node: int, version: str, bound: int) -> Outcome:
        """What came of the question at one client; whatever is wrong with an answer leaves only this client out."""
        try:
            if message is not None and message.has_content() and (size := size_of(message.content)) > bound:
                raise BadParcel(f"its answer is {size} bytes large, at most {bound} were expected")
            told = opened(message, node, self.timeout)
            if not told.control.get("ok"):
                return self.refused(client, told.control)
            payload = payload_of(told)
            loss, marker = loss_in(told.control), self.marker(told.control, version)
        except BadParcel as error:
            return Outcome(client, None, Kept(), problem=f"{error}.")
        if told.control.get("begun_anew"):
            log.warning("Client %s has lost what it kept, and begins anew.", client)
        return Outcome(client, payload, marker, loss)

    def refused(self, client: str, told: Mapping[str, Any]) -> Outcome:
        """A client that says it has no answer."""
        problem = str(told.get("problem"))
        if told.get("kind") == "not_finite" and self.bench.settings.on_nan == "stop":
            raise NotFinite(problem)
        return Outcome(client, None, Kept(), problem=problem)

    def marker(self, told: Mapping[str, Any], version: str) -> Kept:
        """What the server keeps in the place of a client's state."""
        if told.get("version") is None:
            return Kept()
        if told["version"] != version or not isinstance(told.get("digest"), str):
            raise BadParcel("it names another version of its state than it was given")
        return Kept(memory={"run": self.run, "version": version, "digest": told["digest"]})

    @property
    def run(self) -> str:
        """The id of the run at the nodes; a resumed run has the one of its checkpoint."""
        known = next((kept.memory["run"] for kept in self.kept.values() if kept.memory), None)
        return self.new_run if known is None else str(known)

    def needed(self, client: str) -> list[str]:
        """Versions that this client must not remove."""
        states = [self.kept, self.staged, *(state for states in self.reserved.values() for state in states)]
        markers = [state[client].memory for state in states if client in state]
        return sorted({str(marker["version"]) for marker in markers if marker})

    def largest_answer(self, sent: int) -> int:
        """How large an answer may be; more is a mistake or worse."""
        model = sum(entry.size for entry in self.bench.plan.entries.values())
        return TIMES_THE_MODEL * (model + sent) + SPARE_BYTES

    def hold(self, name: str, state: Mapping[str, Kept] | None = None) -> None:
        states = self.reserved.setdefault(name, [])
        states.append(dict(self.kept if state is None else state))
        del states[:-HELD]

    def state_of(self, client: str) -> Kept:
        if client in self.kept:
            raise DataError(f"What client {client} keeps stays on its machine; its own model cannot be put together here.")
        return Kept()

    def client_digests(self) -> dict[str, str]:
        return {client: str(kept.memory["digest"]) for client, kept in self.kept.items() if kept.memory}


def loss_in(told: Mapping[str, Any]) -> float | None:
    """The training loss in an answer."""
    loss = told.get("loss")
    if loss is not None and not isinstance(loss, int | float):
        raise BadParcel(f"its loss is {type(loss).__name__}, not a number")
    return None if loss is None else float(loss)
