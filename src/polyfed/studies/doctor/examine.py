"""The examination: a federation in, findings and one recommended method out. No test image is read."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError
from polyfed.runs.experiment import settings_given
from polyfed.runs.training_settings import with_declared
from polyfed.settings import FACTS, Settings
from polyfed.studies.compare.estimate import Estimate, Estimator
from polyfed.studies.doctor.findings import Advice, Finding, advise, findings, left_out
from polyfed.studies.doctor.measures import Measures, Notify, drawn, measured, untested
from polyfed.studies.report.words import json_values

_SECONDS_TO_ESTIMATE = 3.0


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What the doctor says of a federation.

    Attributes:
        data: its name.
        advice: the recommended method, the runner-up, and why.
        findings: what was found.
        measures: the numbers behind the findings.
        cost: what a run of the recommended method would cost; None where it could not be measured.
        command: how to compare the recommended method, the runner-up and fedavg.
        seconds: CPU seconds that looking took.
    """

    data: str
    advice: Advice
    findings: Sequence[Finding]
    measures: Measures
    cost: Estimate | None
    command: str
    seconds: float

    def finding(self, name: str) -> Finding:
        """A finding by its name."""
        return next(one for one in self.findings if one.name == name)

    @property
    def outliers(self) -> list[str]:
        """Clients that stand out."""
        return [name for one in self.findings for name in one.details.get("outliers", ())]

    @property
    def left_out(self) -> dict[str, str]:
        """Findings that there cannot be here, each with the reason."""
        return left_out(self.measures)

    @property
    def cost_words(self) -> str:
        """What the recommended method costs."""
        if self.cost is None:
            return "What it costs could not be measured."
        traffic = (self.cost.bytes_up + self.cost.bytes_down) / 1e6
        return (
            f"{self.cost.rounds} rounds take about {self.cost.cpu_seconds:.0f} CPU seconds on this machine without scoring, "
            f"and {traffic:.2f} MB for each client and round."
        )

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as ``polyfed doctor --json`` prints it."""
        found: dict[str, Any] = json_values(
            {
                "data": self.data,
                "verdict": self.advice.verdict,
                "method": self.advice.method,
                "runner_up": self.advice.runner_up,
                "reasons": self.advice.reasons,
                "outliers": self.outliers,
                "findings": [one.as_json() for one in self.findings],
                "left_out": self.left_out,
                "clients": self.measures.clients,
                "clients_looked_at": self.measures.looked_at,
                "cost": None
                if self.cost is None
                else {"cpu_seconds": self.cost.cpu_seconds, "rounds": self.cost.rounds}
                | {"bytes_up": self.cost.bytes_up, "bytes_down": self.cost.bytes_down},
                "command": self.command,
                "seconds": self.seconds,
            }
        )
        return found

    def __repr__(self) -> str:
        lines = [f"{one.name:<15} {one.value:8.2f} {one.unit:<16} {one.sentence}" for one in self.findings]
        advice = self.advice
        told = [f"{advice.verdict}: use {advice.method} (runner-up: {advice.runner_up})", *advice.reasons, self.cost_words]
        lines += [f"{name:<15} left out: {why}." for name, why in self.left_out.items()]
        title = f"{self.data}, {self.measures.looked_at} of {self.measures.clients} clients"
        return "\n".join([title, *lines, *told, *([self.command] if self.command else [])])


def examine(data: Any, model: Any = None, notify: Notify | None = None, **values: Any) -> Diagnosis:
    """What ``polyfed.doctor`` does."""
    notify = notify or (lambda _: None)
    settings = settings_given(data, model, values)
    begun = time.process_time()
    federation = untested(data if not isinstance(data, str | Path) else settings.data, settings)
    named = None if isinstance(model, str) else model
    settings = dataclasses.replace(settings, batch_size=with_declared(settings, federation, named)[0].batch_size)
    notify("Taking a few steps at each client")
    measures = measured(federation, named, settings, notify)
    notify("Measuring what a run would cost")
    found = findings(measures)
    advice = advise({one.name: one for one in found})
    cost = _cost_of(advice.method, federation, named, settings)
    return Diagnosis(settings.data, advice, found, measures, cost, _command_for(settings, advice), time.process_time() - begun)


def _cost_of(method: str, federation: Any, model: Any, settings: Settings) -> Estimate | None:
    """What training with a method would cost, from a few batches of a few clients; scoring is left out, since tests are out of reach."""
    few = drawn(federation, settings.seed)
    plain = dataclasses.replace(
        settings, partition="domain", unseen=(), unseen_part="test", few_shot=0, root=None, selection="last", clients_per_round=None
    )
    try:
        return Estimator(plain, few, method, model, _SECONDS_TO_ESTIMATE).estimate(federation)
    except PolyfedError:
        return None


def _command_for(settings: Settings, advice: Advice) -> str:
    """The command that compares the recommended method with the next one and fedavg."""
    methods = "; ".join(dict.fromkeys([advice.method, advice.runner_up, "fedavg"]))
    words = ["polyfed", "sweep", settings.data, "--methods", methods, "--lr", "0.01,0.03,0.1,0.3"]
    for name, facts in FACTS.items():
        value = getattr(settings, name)
        if value != facts.default and name not in ("data", "method", "lr", "load", "seed"):
            for one in value if isinstance(value, tuple) else (value,):
                words += [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join(words)
