"""The loop: it holds every conversation a method asks for, and knows nothing about any method."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from polyfed.core.conversation import AskClients, converse, standard_round
from polyfed.errors import TooFewReplies

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.server import Server

log = logging.getLogger("polyfed")

Observer: TypeAlias = "Callable[[Server], None]"


class Transaction(Protocol):
    """What clients keep in a round: final when the round has succeeded, forgotten when it has not."""

    def commit(self, without: Collection[str] = ()) -> None:
        """Make it final, except for some clients."""

    def rollback(self) -> None:
        """Forget it."""


def hold(
    method: Method,
    server: Server,
    client_states: Transaction,
    ask_clients: AskClients,
    rounds: int,
    observers: Iterable[Observer] = (),
) -> None:
    """Hold the setup and the rounds that are still to come.

    Args:
        method: whose conversations are held.
        server: the state; ``server.round`` says how far it is.
        client_states: what clients keep; usually the backend.
        ask_clients: the backend, or a wrapper of it that counts what travels.
        rounds: the last round.
        observers: called after every round, and once after the setup.
    """
    watching = tuple(observers)
    if server.round == 0:
        for setup in method.setup:
            converse(setup(server), ask_clients)
        client_states.commit()
        for observer in watching:
            observer(server)
    for number in range(server.round + 1, rounds + 1):
        hold_round(method, server, client_states, ask_clients, number)
        for observer in watching:
            observer(server)


def hold_round(method: Method, server: Server, client_states: Transaction, ask_clients: AskClients, number: int) -> None:
    """Hold one round; repeat it from the same state when too few clients answered."""
    talk = method.round or standard_round
    before = server.bookmark()
    for attempt in range(server.settings.retries + 1):
        server.begin(number, attempt)
        try:
            converse(talk(server), ask_clients)
        except TooFewReplies as error:
            client_states.rollback()
            server.go_back(before)
            if diverged(server):
                server.round = number - 1
                raise TooFewReplies(
                    f"Training diverged in round {number}: the weights of all {server.asked} clients became NaN or infinite. Lower the "
                    f"learning rate (--lr is {server.settings.lr:g}); everything up to round {number - 1} is kept."
                ) from error
            if attempt == server.settings.retries:
                server.round = number - 1
                raise TooFewReplies(
                    f"{error} The round was tried {attempt + 1} times; everything up to round {number - 1} is kept."
                ) from error
            log.warning("%s The round is repeated.", error)
        else:
            client_states.commit(without=server.rejected)
            return


def diverged(server: Server) -> bool:
    """Whether every client that was asked answered with values that are not finite; to repeat the round would not help."""
    return len(server.rejected) == server.asked > 1 and all("not finite" in why for why in server.rejected.values())
