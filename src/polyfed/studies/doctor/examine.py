"""Examine a federation and recommend a method, without reading any test image."""

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
from polyfed.studies.doctor.measures import Measures, Notify, draw, federation_without_tests, measure
from polyfed.studies.report.words import json_values

_SECONDS_TO_ESTIMATE = 3.0


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The findings about a federation and the recommended method.

    Attributes:
        data: Name of the data.
        advice: Recommended method, runner-up and reasons.
        findings: Findings.
        measures: The measurements behind the findings.
        cost: Estimated cost of a run with the recommended method, or None if it could not be measured.
        command: Command that compares the recommended method, the runner-up and fedavg.
        seconds: CPU seconds that the examination took.
    """

    data: str
    advice: Advice
    findings: Sequence[Finding]
    measures: Measures
    cost: Estimate | None
    command: str
    seconds: float

    def finding(self, name: str) -> Finding:
        """Return the finding with this name."""
        return next(one for one in self.findings if one.name == name)

    @property
    def outliers(self) -> list[str]:
        """Clients that differ clearly from the others."""
        return [name for one in self.findings for name in one.details.get("outliers", ())]

    @property
    def left_out(self) -> dict[str, str]:
        """Findings that do not apply to this federation, with the reasons."""
        return left_out(self.measures)

    @property
    def cost_words(self) -> str:
        """Cost of the recommended method as text."""
        if self.cost is None:
            return "The cost could not be measured."
        traffic = (self.cost.bytes_up + self.cost.bytes_down) / 1e6
        return (
            f"{self.cost.rounds} rounds take about {self.cost.cpu_seconds:.0f} CPU seconds on this machine without scoring, "
            f"and {traffic:.2f} MB per client and round."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as ``polyfed doctor --json`` prints it."""
        cost_fields = ("cpu_seconds", "rounds", "bytes_up", "bytes_down")
        found: dict[str, Any] = json_values(
            {
                "data": self.data,
                **dataclasses.asdict(self.advice),
                "outliers": self.outliers,
                "findings": [one.as_json() for one in self.findings],
                "left_out": self.left_out,
                "clients": self.measures.clients,
                "clients_looked_at": self.measures.looked_at,
                "cost": None if self.cost is None else {name: getattr(self.cost, name) for name in cost_fields},
                "command": self.command,
                "seconds": self.seconds,
            }
        )
        return found

    def __repr__(self) -> str:
        lines = [f"{one.name:<15} {one.value:8.2f} {one.unit:<16} {one.sentence}" for one in self.findings]
        advice = self.advice
        lines += [f"{name:<15} skipped: {why}." for name, why in self.left_out.items()]
        lines += [f"{advice.verdict}: use {advice.method} (runner-up: {advice.runner_up})", *advice.reasons, self.cost_words]
        title = f"{self.data}, {self.measures.looked_at} of {self.measures.clients} clients"
        return "\n".join([title, *lines, self.command])


def examine(data: Any, model: Any = None, notify: Notify | None = None, **values: Any) -> Diagnosis:
    """Implement ``polyfed.doctor``."""
    notify = notify or (lambda _: None)
    settings = settings_given(data, model, values)
    start = time.process_time()
    federation = federation_without_tests(data if not isinstance(data, str | Path) else settings.data, settings)
    named = None if isinstance(model, str) else model
    settings = dataclasses.replace(settings, batch_size=with_declared(settings, federation, named)[0].batch_size)
    notify("Training a few steps at each client")
    measures = measure(federation, named, settings, notify)
    notify("Measuring the cost of a run")
    found = findings(measures)
    advice = advise({one.name: one for one in found})
    cost = _cost_of(advice.method, federation, named, settings)
    return Diagnosis(settings.data, advice, found, measures, cost, _command_for(settings, advice), time.process_time() - start)


def _cost_of(method: str, federation: Any, model: Any, settings: Settings) -> Estimate | None:
    """Estimate the cost of training with a method from a few batches of a few clients, without scoring."""
    few = draw(federation, settings.seed)
    plain = dataclasses.replace(
        settings, partition="domain", unseen=(), unseen_part="test", few_shot=0, root=None, selection="last", clients_per_round=None
    )
    try:
        return Estimator(plain, few, method, model, _SECONDS_TO_ESTIMATE).estimate(federation)
    except PolyfedError:
        return None


def _command_for(settings: Settings, advice: Advice) -> str:
    methods = "; ".join(dict.fromkeys([advice.method, advice.runner_up, "fedavg"]))
    arguments = ["polyfed", "sweep", settings.data, "--methods", methods, "--lr", "0.01,0.03,0.1,0.3"]
    for name, facts in FACTS.items():
        value = getattr(settings, name)
        if value != facts.default and name not in ("data", "method", "lr", "load", "seed"):
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join(arguments)
