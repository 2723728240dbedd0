"""A backend for finding mistakes: checks every step, names client and stage, and attaches the inputs to an error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from polyfed.backends.base import Outcome
from polyfed.backends.in_process import InProcess
from polyfed.core.conversation import Ask, Payload
from polyfed.core.data_types import ClientData
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import ClientFailure


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

    def outcome(self, ask: Ask, name: str, state: ClientState) -> Outcome:
        try:
            with torch.autograd.set_detect_anomaly(True):
                return super().outcome(ask, name, state)
        except ClientFailure as error:
            error.inputs = Inputs(name, ask.round, ask.what, ask.payloads[name])
            raise
