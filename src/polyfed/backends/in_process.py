"""Clients of this process: swapped into one resident model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.core.client import Client, answer
from polyfed.core.conversation import Ask
from polyfed.core.workbench import ClientState
from polyfed.errors import NotFinite


class InProcess(StagingBackend):
    """The default backend.

    ``takes_groups``: whether ``outcomes`` is faster the more clients it gets at once, as where they are trained together.
    """

    takes_groups = False

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        """What comes of the question at each of these clients, in their order."""
        for client in clients:
            yield self.outcome(ask, client, self.current_state(client))

    def outcome(self, ask: Ask, name: str, state: ClientState) -> Outcome:
        """Let one client answer."""
        client = Client(self.data[name], self.bench, state, ask.round, ask.attempt)
        try:
            payload = answer(client, ask.what, ask.payloads[name])
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            return Outcome(name, None, state, problem=str(error))
        return Outcome(name, payload, client.state, client.loss)
