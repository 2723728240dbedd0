"""A delivery for finding mistakes: checks every step, names client and stage, and keeps the inputs of a failure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from polyfed.client import Kept, Workbench
from polyfed.conversation import Ask, Payload
from polyfed.data.federation import ClientData
from polyfed.errors import ClientFailure
from polyfed.simulate.in_process import InProcess, Outcome


@dataclass(frozen=True)
class Inputs:
    """What was asked of whom when something failed."""

    client: str
    round: int
    what: str
    payload: Payload


class Debug(InProcess):
    """Slow and careful: autograd's anomaly detection is on, every loss is checked, and an error carries the inputs of what failed."""

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        bench.checks_each_step = True

    def outcome(self, ask: Ask, name: str, held: Kept) -> Outcome:
        try:
            with torch.autograd.set_detect_anomaly(True):
                return super().outcome(ask, name, held)
        except ClientFailure as error:
            error.inputs = Inputs(name, ask.round, ask.what, ask.payloads[name])
            raise
