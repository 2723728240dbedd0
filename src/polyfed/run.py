"""START HERE: the loop. It holds every conversation a method asks for, and knows nothing about any method.

``hold`` is the loop; ``run`` is the door for Python: data and a method in, a result out.
Nothing heavy is imported here, so that the command line answers at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from polyfed.conversation import Ask, Deliver, Reply, converse, standard_round
from polyfed.errors import TooFewReplies

if TYPE_CHECKING:
    from torch import nn

    from polyfed.method import Method
    from polyfed.result import Result
    from polyfed.server import Server

log = logging.getLogger("polyfed")

Observer: TypeAlias = "Callable[[Server], None]"


class Delivery(Protocol):
    """Carries asks to clients and keeps what they keep; committed only when a round has succeeded."""

    def __call__(self, ask: Ask) -> Iterator[Reply]: ...

    def commit(self, without: Mapping[str, str] | Collection[str] = ()) -> None: ...

    def rollback(self) -> None: ...


def hold(
    method: Method, server: Server, delivery: Delivery, carry: Deliver, rounds: int, observers: Iterable[Observer] = ()
) -> None:
    """Hold the openings and the rounds that are still to come.

    Args:
        method: whose conversations are held.
        server: the state; ``server.round`` says how far it is.
        delivery: keeps what clients keep.
        carry: the delivery, or a wrapper of it that counts what travels.
        rounds: the last round.
        observers: called after every round, and once after the openings.
    """
    watching = tuple(observers)
    if server.round == 0:
        for opening in method.opening:
            converse(opening(server), carry)
        delivery.commit()
        for observer in watching:
            observer(server)
    for number in range(server.round + 1, rounds + 1):
        hold_round(method, server, delivery, carry, number)
        for observer in watching:
            observer(server)


def hold_round(method: Method, server: Server, delivery: Delivery, carry: Deliver, number: int) -> None:
    """Hold one round; repeat it from the same state when too few clients answered."""
    talk = method.round or standard_round
    before = server.bookmark()
    for attempt in range(server.settings.retries + 1):
        server.begin(number, attempt)
        try:
            converse(talk(server), carry)
        except TooFewReplies as error:
            delivery.rollback()
            server.go_back(before)
            if attempt == server.settings.retries:
                server.round = number - 1
                raise TooFewReplies(
                    f"{error} The round was tried {attempt + 1} times; everything up to round {number - 1} is kept."
                ) from error
            log.warning("%s The round is repeated.", error)
        else:
            delivery.commit(without=server.rejected)
            return


def run(
    data: Any = "digits-mini",
    method: str | Method | None = None,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    **settings: Any,
) -> Result:
    """Train a federation and return what came out.

    Args:
        data: the name of a data set, a folder ``root/<domain>/<class>/*``, a Federation or DataSet, or a mapping
            ``{domain: (train, test)}`` of torch data sets.
        method: its text, or a Method; default: the method underneath all others.
        model: a name, a module, or a function that builds one; default: the data set's own.
        settings: any field of ``polyfed.Settings`` (``rounds=20``, ``lr=0.05``, ``seed=0``...), ``out=DIR`` to write a run folder,
            and ``progress=True`` for a progress bar.

    Returns:
        The accuracy table, the costs, ``model_for(client)`` and ``newcomer()``.
    """
    from polyfed.experiment import run_experiment

    return run_experiment(data, method, model, **settings)
