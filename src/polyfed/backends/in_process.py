"""Backends that run the clients in this process, one after the other, in one resident model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.core.client import Client, answer, local_validation
from polyfed.core.data_types import ClientData
from polyfed.core.evaluation import evaluate_together, neighbours
from polyfed.core.rounds import Payload, Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import ClientFailure, DataError, Declined, NotFinite


class InProcess(StagingBackend):
    """The default backend.

    Attributes:
        takes_groups: ``outcomes`` is faster for many clients at once, because they are trained together.
    """

    takes_groups = False

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        if request.together:
            for group in self.evaluation_groups(request, clients):
                yield from self._evaluate(request, group)
            return
        for client in clients:
            yield self.outcome(request, client, self.current_state(client))

    def evaluation_groups(self, request: Request, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield groups of clients that are evaluated in one batch."""
        if clients:
            for group in neighbours([self.data[client] for client in clients], request.payloads[clients[0]].extras, self.bench):
                yield [client.id for client in group]

    def _evaluate(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        """Evaluate a group in one batch if possible, otherwise one client at a time."""
        states = [self.current_state(client) for client in group]
        clients = [self.client(request, name, state) for name, state in zip(group, states, strict=True)]
        payloads = evaluate_together(clients, request.payloads[group[0]]) or [None] * len(group)
        for name, state, payload in zip(group, states, payloads, strict=True):
            yield self.outcome(request, name, state) if payload is None else Outcome(name, payload, state)

    def client(self, request: Request, name: str, state: ClientState) -> Client:
        return Client(self.data[name], self.bench, state, request.round, request.attempt)

    def outcome(self, request: Request, name: str, state: ClientState) -> Outcome:
        client = self.client(request, name, state)
        try:
            payload = answer(client, request.what, request.payloads[name])
        except Declined as error:
            return Outcome(name, None, state, problem=str(error))
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                error.locate(name, request.round)
                raise
            return Outcome(name, None, state, problem=error.reason)
        validation = local_validation(client) if request.what == "train" else None
        return Outcome(name, payload, client.state, client.loss, validation=validation)


@dataclass(frozen=True)
class Inputs:
    client: str
    round: int
    what: str
    payload: Payload


class Debug(InProcess):
    """A slow backend for debugging: autograd detects anomalies, every loss is checked, and errors contain the failing inputs."""

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        bench.checks_each_step = True

    def outcome(self, request: Request, name: str, state: ClientState) -> Outcome:
        try:
            with torch.autograd.set_detect_anomaly(True):
                return super().outcome(request, name, state)
        except ClientFailure as error:
            error.inputs = Inputs(name, request.round, request.what, request.payloads[name])
            raise


class WithoutData(InProcess):
    """A backend for runs whose training data is not available. Clients can only be evaluated on other data and return their entries.

    Args:
        bench: Model, method and settings of the run.
        clients: Placeholders without test sets.
        at_nodes: The client states stayed on the nodes as well, and the run folder contains only their hashes.
    """

    def __init__(self, bench: Workbench, clients: Collection[ClientData], at_nodes: bool = False) -> None:
        super().__init__(bench, clients)
        self.at_nodes = at_nodes

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        if request.what not in ("entries", "evaluate"):
            raise DataError(
                f"{self.bench.method} sends clients a request ({request.what}) that needs their training data, which is not available "
                "here. Evaluate the run on a machine that has the data: polyfed evaluate RUN, without other DATA."
            )
        for client in clients:
            if request.what == "entries" or self.data[client].tests:
                yield self.outcome(request, client, self.state_of(client))

    def can_read(self, client: str) -> bool:
        return not self.at_nodes or client not in self.client_states

    def state_of(self, client: str) -> ClientState:
        if not self.can_read(client):
            raise DataError(
                f"The state of client {client} is stored at its node, so its model cannot be built here. The newcomer model can be "
                "built (--newcomer averaged or re-estimated) if the run folder contains newcomer.safetensors. To save this file, run "
                "flwr run APP --run-config 'out=\"RUN\" newcomer-model=true' while the nodes are connected."
            )
        return super().state_of(client)

    def client_digests(self) -> dict[str, str]:
        if not self.at_nodes:
            return super().client_digests()
        return {client: str(state.memory["digest"]) for client, state in self.client_states.items()}
