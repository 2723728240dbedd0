"""The backend that measures which way is faster: clients one by one, or stacked.

It measures once, on copies, with the first group of clients that could be stacked; neither state nor random numbers are touched by it.
The choice depends on the machine and on what else it does, and the two ways differ in the last bits.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Sequence

from polyfed.backends.base import Outcome
from polyfed.backends.fused import Fused
from polyfed.backends.in_process import InProcess
from polyfed.backends.stacked import Key, Stack, Trainee
from polyfed.core.client import Client, answer
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import Declined, NotFinite

log = logging.getLogger("polyfed")

STEPS, ONE_BY_ONE, TOGETHER = 3, 2, 10


class Auto(Fused):
    """Fused where that is faster, else the ordinary way."""

    insists = False

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        self.stacks: bool | None = None

    def outcomes_of(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        """Train a group in the way that was found faster; the first group decides."""
        if len(group) > 1 and self.stacks is None:
            try:
                self.stacks = self.choose(request, group)
            except (NotFinite, Declined):
                log.info("Backend auto: a client of this group cannot train now, so another group decides.")
        return super().outcomes_of(request, group) if self.stacks else InProcess.outcomes(self, request, group)

    def choose(self, request: Request, group: Sequence[str]) -> bool:
        """Whether stacked clients train faster; says what was found."""
        reason = self.unfit or self.reason_of_trial(request, group)
        if reason:
            log.info("Backend auto: clients are trained one by one. %s", reason)
            return False
        few = group[:TOGETHER]
        single, together = self.seconds_one_by_one(request, few[:ONE_BY_ONE]), self.seconds_together(request, few)
        log.info(
            "Backend auto: %s, by CPU time for a step of one client: %.2f ms by itself, %.2f ms stacked with %d others.",
            "clients are stacked (fused)" if together < single else "clients are trained one by one (process)",
            1000 * single,
            1000 * together,
            len(few) - 1,
        )
        return together < single

    def reason_of_trial(self, request: Request, group: Sequence[str]) -> str:
        """Why these clients cannot be stacked; empty when they can."""
        keys: set[Key] = {Trainee(client, request.payloads[client.id]).key for client in self.copies(request, group)}
        if len(keys) > 1:
            return "Their states differ too much to be stacked."
        return self.why_not(request, group, keys.pop())

    def copies(self, request: Request, group: Sequence[str]) -> list[Client]:
        settings = dataclasses.replace(self.bench.settings, local_steps=STEPS)
        bench = dataclasses.replace(self.bench, model=copy.deepcopy(self.bench.model), settings=settings)
        states = {name: self.current_state(name) for name in group}
        return [
            Client(
                self.data[n], bench, ClientState(states[n].entries, copy.deepcopy(states[n].memory)), request.round, request.attempt
            )
            for n in group
        ]

    def seconds_one_by_one(self, request: Request, group: Sequence[str]) -> float:
        """CPU seconds for a step of one client by itself; the first client only warms up."""
        first, *rest = self.copies(request, group)
        answer(first, "train", request.payloads[first.id])
        began = time.process_time()
        for client in rest:
            answer(client, "train", request.payloads[client.id])
        return (time.process_time() - began) / (STEPS * len(rest))

    def seconds_together(self, request: Request, group: Sequence[str]) -> float:
        """CPU seconds for a step of one client in a stack; the first time only warms up."""
        spent = 0.0
        for _ in range(2):
            began = time.process_time()
            stack = Stack([Trainee(client, request.payloads[client.id]) for client in self.copies(request, group)])
            for place, (trainee, total, steps) in enumerate(stack.train()):
                trainee.end(*stack.row(place), total, steps)
            spent = time.process_time() - began
        return spent / (STEPS * len(group))
