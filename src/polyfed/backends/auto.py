"""The backend that measures whether this machine trains clients faster one by one or stacked."""

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

STEPS, MAX_SINGLE, MAX_STACKED = 3, 2, 10


class Auto(Fused):
    """Measures both ways once, on copies of the first group that could be stacked. Their results differ in the last bits."""

    required = False

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        self.stacks: bool | None = None

    def group_outcomes(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        if len(group) > 1 and self.stacks is None:
            try:
                self.stacks = self.choose(request, group)
            except (NotFinite, Declined):
                log.info("Backend auto: a client of this group cannot train now; deciding with the next group.")
        return super().group_outcomes(request, group) if self.stacks else InProcess.outcomes(self, request, group)

    def choose(self, request: Request, group: Sequence[str]) -> bool:
        """Return True if stacked clients train faster, and log the measured times."""
        reason = self.unfit or self.stacking_problem(request, group)
        if reason:
            log.info("Backend auto: training clients one by one. %s", reason)
            return False
        some = group[:MAX_STACKED]
        single, stacked = self.single_seconds(request, some[:MAX_SINGLE]), self.stacked_seconds(request, some)
        log.info(
            "Backend auto: %s. CPU time per step and client: %.2f ms alone, %.2f ms stacked with %d others.",
            "stacking clients (fused)" if stacked < single else "training clients one by one (process)",
            1000 * single,
            1000 * stacked,
            len(some) - 1,
        )
        return stacked < single

    def stacking_problem(self, request: Request, group: Sequence[str]) -> str:
        """Return the reason why these clients cannot be stacked, or an empty string."""
        keys: set[Key] = {Trainee(client, request.payloads[client.id]).key for client in self.copies(request, group)}
        if len(keys) > 1:
            return "The client states differ too much."
        return self.fusing_problem(request, group, keys.pop())

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

    def single_seconds(self, request: Request, group: Sequence[str]) -> float:
        """Return the CPU seconds per step of clients that train alone. The first client is a warm-up."""
        first, *rest = self.copies(request, group)
        answer(first, "train", request.payloads[first.id])
        start = time.process_time()
        for client in rest:
            answer(client, "train", request.payloads[client.id])
        return (time.process_time() - start) / (STEPS * len(rest))

    def stacked_seconds(self, request: Request, group: Sequence[str]) -> float:
        """Return the CPU seconds per step and client of a stack. The first pass is a warm-up."""
        seconds = 0.0
        for _ in range(2):
            start = time.process_time()
            stack = Stack([Trainee(client, request.payloads[client.id]) for client in self.copies(request, group)])
            for place, (trainee, total, steps) in enumerate(stack.train()):
                trainee.end(*stack.row(place), total, steps)
            seconds = time.process_time() - start
        return seconds / (STEPS * len(group))
