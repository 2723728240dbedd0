"""The backend of a run folder that was opened where the clients' data are not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from polyfed.backends.base import Outcome
from polyfed.backends.in_process import InProcess
from polyfed.core.conversation import Ask
from polyfed.core.data_types import ClientData
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import DataError


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

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        if ask.what not in ("entries", "evaluate"):
            raise DataError(
                f"{self.bench.method} has a question for its clients ({ask.what}) that needs the data they trained on, which are not here. "
                "Score the run where they are: polyfed evaluate RUN, without other DATA."
            )
        for client in clients:
            if ask.what == "entries" or self.data[client].tests:
                yield self.outcome(ask, client, self.state_of(client))

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
