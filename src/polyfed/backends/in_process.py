"""Clients of this process: swapped into one resident model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.core.client import Client, answer, local_validation
from polyfed.core.conversation import Ask
from polyfed.core.joint_scoring import evaluate_together, neighbours
from polyfed.core.workbench import ClientState
from polyfed.errors import Declined, NotFinite


class InProcess(StagingBackend):
    """The default backend.

    ``takes_groups``: whether ``outcomes`` is faster the more clients it gets at once, as where they are trained together.
    """

    takes_groups = False

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        if ask.together:
            for group in self.scored_together(ask, clients):
                yield from self.scores_of(ask, group)
            return
        for client in clients:
            yield self.outcome(ask, client, self.current_state(client))

    def scored_together(self, ask: Ask, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Groups of clients that are scored in one batch."""
        if clients:
            for group in neighbours([self.data[client] for client in clients], ask.payloads[clients[0]].extras, self.bench):
                yield [client.id for client in group]

    def scores_of(self, ask: Ask, group: Sequence[str]) -> Iterator[Outcome]:
        """Score a group in one batch, or one by one where that is all that can be done."""
        states = [self.current_state(client) for client in group]
        at_work = [
            Client(self.data[name], self.bench, state, ask.round, ask.attempt) for name, state in zip(group, states, strict=True)
        ]
        answers = evaluate_together(at_work, ask.payloads[group[0]]) or [None] * len(group)
        for name, state, found in zip(group, states, answers, strict=True):
            yield self.outcome(ask, name, state) if found is None else Outcome(name, found, state)

    def outcome(self, ask: Ask, name: str, state: ClientState) -> Outcome:
        client = Client(self.data[name], self.bench, state, ask.round, ask.attempt)
        try:
            payload = answer(client, ask.what, ask.payloads[name])
        except Declined as error:
            return Outcome(name, None, state, problem=str(error))
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            return Outcome(name, None, state, problem=str(error))
        validation = local_validation(client) if ask.what == "train" else None
        return Outcome(name, payload, client.state, client.loss, validation=validation)
