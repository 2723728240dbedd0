"""Clients of this process, swapped into one resident model, one after the other; also for finding mistakes, and where data are not here."""

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

    ``takes_groups``: whether ``outcomes`` is faster the more clients it gets at once, as where they are trained together.
    """

    takes_groups = False

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        if request.together:
            for group in self.scored_together(request, clients):
                yield from self.scores_of(request, group)
            return
        for client in clients:
            yield self.outcome(request, client, self.current_state(client))

    def scored_together(self, request: Request, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Groups of clients that are scored in one batch."""
        if clients:
            for group in neighbours([self.data[client] for client in clients], request.payloads[clients[0]].extras, self.bench):
                yield [client.id for client in group]

    def scores_of(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        """Score a group in one batch, or one by one where that is all that can be done."""
        states = [self.current_state(client) for client in group]
        at_work = [
            Client(self.data[name], self.bench, state, request.round, request.attempt)
            for name, state in zip(group, states, strict=True)
        ]
        answers = evaluate_together(at_work, request.payloads[group[0]]) or [None] * len(group)
        for name, state, found in zip(group, states, answers, strict=True):
            yield self.outcome(request, name, state) if found is None else Outcome(name, found, state)

    def outcome(self, request: Request, name: str, state: ClientState) -> Outcome:
        client = Client(self.data[name], self.bench, state, request.round, request.attempt)
        try:
            payload = answer(client, request.what, request.payloads[name])
        except Declined as error:
            return Outcome(name, None, state, problem=str(error))
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            return Outcome(name, None, state, problem=str(error))
        validation = local_validation(client) if request.what == "train" else None
        return Outcome(name, payload, client.state, client.loss, validation=validation)


@dataclass(frozen=True)
class Inputs:
    client: str
    round: int
    what: str
    payload: Payload


class Debug(InProcess):
    """Slow and careful: autograd's anomaly detection is on, every loss is checked, and an error carries the inputs of what failed."""

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
    """Clients can be scored on other data and return what they keep. Any other question would need their own data, and is refused.

    Args:
        bench: the bench.
        clients: placeholders without tests.
        at_nodes: what clients keep stayed on their machines too; here are only marks of it.
    """

    def __init__(self, bench: Workbench, clients: Collection[ClientData], at_nodes: bool = False) -> None:
        super().__init__(bench, clients)
        self.at_nodes = at_nodes

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        if request.what not in ("entries", "evaluate"):
            raise DataError(
                f"{self.bench.method} has a question for its clients ({request.what}) that needs the data they trained on, which are not here. "
                "Score the run where they are: polyfed evaluate RUN, without other DATA."
            )
        for client in clients:
            if request.what == "entries" or self.data[client].tests:
                yield self.outcome(request, client, self.state_of(client))

    def can_read(self, client: str) -> bool:
        return not self.at_nodes or client not in self.client_states

    def state_of(self, client: str) -> ClientState:
        if not self.can_read(client):
            raise DataError(
                f"What client {client} keeps stayed at its node, so its own model cannot be put together here. The newcomer's can "
                "(--newcomer averaged or re-estimated), if the server left a newcomer.safetensors in the run folder; "
                "flwr run APP --run-config 'out=\"RUN\" newcomer-model=true' lets it do so while the nodes are there."
            )
        return super().state_of(client)

    def client_digests(self) -> dict[str, str]:
        if not self.at_nodes:
            return super().client_digests()
        return {client: str(state.memory["digest"]) for client, state in self.client_states.items()}
