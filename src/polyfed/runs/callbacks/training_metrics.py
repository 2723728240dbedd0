"""Metrics of every training round, and a warning after round 1 if the loss is above the chance level.

Client spread: the deviation over clients, for each entry kind that differs between clients. It covers the models that clients would be
tested with: the entries that the server sends and those that clients keep. It is omitted if all clients have the server model, or if
other machines keep their entries. With many clients, a fixed subset is measured, so that the cost per round stays the same.

Statistics drift: how batch-norm statistics change per round and client (FixBN Figure 2). Client statistics are those sent after local
training, or those that clients keep. They are compared with the server statistics before the round, or with the client mean if the
server has none.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.backends.base import Backend
from polyfed.core.entries import STATISTIC
from polyfed.core.privacy import account_of
from polyfed.core.rounds import Reply, Request
from polyfed.core.server import Server
from polyfed.core.sharing import Plan
from polyfed.runs.callbacks.callback import ActiveRun, Callback, RunState
from polyfed.settings import AUTO

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")

SPREAD, STATISTICS, NOTED = "spread", "statistics", "noted"
"""Views of the metrics: the two above, and the values that a method logs (``server.log_client_metric``)."""
ALL = "all"
"""Value of ``client`` in lines about all clients."""
OF_TRAINING = ("training", SPREAD, STATISTICS, NOTED)
"""Views that training writes; the others are scores."""
MARGIN = 1.1
"""A random model starts a few percent above the chance level."""


class TrainingMetrics(Callback):
    """Write losses, privacy spending, client spread, statistics drift and the metrics that the method logs."""

    def __init__(self, run: ActiveRun) -> None:
        self.run, self.experiment = run, run.experiment
        if run.folder is not None:
            self.drift = StatisticsDrift(self.experiment.bench.plan, self.experiment.server, self.experiment.backend)
            self.experiment.on_reply = self.drift.receive

    def after_round(self, run: RunState) -> None:
        self._warn_of_loss(run)
        if self.run.folder is None:
            return
        server, backend = self.experiment.server, self.experiment.backend
        account = account_of(server)
        self.run.write(
            [
                *({"round": run.round, "view": "training", "client": name, "loss": loss} for name, loss in run.losses.items()),
                *(_privacy_lines(run.round, account) if account is not None else ()),
                *spread_lines(server, backend, self.experiment.bench.initial),
                *self.drift.lines(server, backend),
                *_logged_lines(server),
            ]
        )

    def _warn_of_loss(self, run: RunState) -> None:
        if run.round != 1 or not run.losses:
            return
        loss, start = statistics.fmean(run.losses.values()), initial_loss(self.experiment)
        if not math.isfinite(loss):
            problem = f"the training loss is {loss} after round 1."
        elif start is not None and loss > MARGIN * start:
            problem = f"the mean training loss of round 1 is {loss:.3g}, above the chance level ({start:.3g})."
        else:
            return
        log.warning("%s: %s The learning rate may be too high. Try --lr %g.", run.method, problem, run.settings.lower_lr)


def initial_loss(experiment: Experiment) -> float | None:
    """Return the loss at chance level; None if the run does not use the default loss, or adds a term to it."""
    method, bench = experiment.method, experiment.bench
    changed = experiment.settings.loss != AUTO or "loss" in experiment.objects
    if changed or method.task_loss or method.batch_gradient or method.objective:
        return None
    return bench.task.chance_loss(bench.classes)


def _logged_lines(server: Server) -> list[Mapping[str, Any]]:
    by_client: dict[str, dict[str, Any]] = {}
    for name, values in server.client_metrics.items():
        for client, value in values.items():
            by_client.setdefault(client, {})[name] = value
    return [{"round": server.round, "view": NOTED, "client": client, **values} for client, values in by_client.items()]


def _privacy_lines(number: int, account: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    common = {"round": number, "view": "privacy", "privacy.delta": account["delta"]}
    each = [
        {**common, "client": client, "privacy.epsilon_spent": found["epsilon_spent"]}
        for client, found in account["clients"].items()
    ]
    return [*each, {**common, "client": "all", "privacy.epsilon_spent": account["epsilon_spent"]}]


MAX_CLIENTS = 20
"""Number of clients that are measured per round, evenly spaced over the list of clients."""
CHUNK = 1 << 18
"""Number of values that are processed at a time."""


@dataclass
class Moments:
    """Running mean and sum of squared deviations of tensors over clients."""

    count: dict[str, int] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.float()
            if name not in self.mean:
                self.count[name], self.mean[name], self.squares[name] = 0, _zeros(value), _zeros(value)
            self.count[name] += 1
            for part, mean, squares in _chunks(value, self.mean[name], self.squares[name]):
                off = part - mean
                mean += off / self.count[name]
                squares += off * (part - mean)

    def variance(self, name: str) -> Tensor:
        return self.squares[name].clamp_min(0) / self.count[name]

    def in_parts(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mean and variance of the values, in chunks."""
        for mean, squares in _chunks(self.mean[name], self.squares[name]):
            yield mean, squares.clamp_min(0) / self.count[name]


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value, memory_format=torch.contiguous_format)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of one shape into flat chunks, because temporary copies of whole models would be slow."""
    return zip(*(torch.split(tensor.flatten(), CHUNK) for tensor in tensors), strict=True)


def spread_lines(server: Server, backend: Backend, initial: Mapping[str, Tensor]) -> list[Mapping[str, Any]]:
    """Return a metrics line for each entry kind in which client models differ.

    ``deviation`` is the standard deviation over clients, averaged over the values of this kind; ``relative`` is its root mean square,
    divided by the root mean square of the values.
    """
    moments = Moments()
    for values in differing_entries(server, backend, initial):
        moments.add(values)
    kinds: dict[str, list[str]] = {}
    for name in moments.mean:
        kinds.setdefault(server.plan.entries[name].kind, []).append(name)
    return [
        {"round": server.round, "view": SPREAD, "client": ALL, "kind": kind, **_numbers(moments, names)}
        for kind, names in kinds.items()
    ]


def differing_entries(server: Server, backend: Backend, initial: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Yield for each client the model entries that differ from the server model; nothing if they are on other machines."""
    entries, down = server.plan.entries, set(server.phase.down)
    own = [n for n, entry in entries.items() if entry.of is None and entry.dtype.is_floating_point and n not in down]
    ids = few_clients(server)
    if len(ids) < 2 or not (own or server.method.outgoing) or (own and not all(map(backend.can_read, ids))):
        return
    for client in ids:
        kept = backend.state_of(client).entries if own else {}
        sent = server.outgoing(client) if server.method.outgoing else {}
        made = {name: value for name, value in sent.items() if value is not server.state.get(name) and entries[name].of is None}
        yield made | {name: kept.get(name, initial[name]) for name in own}


def few_clients(server: Server) -> list[str]:
    """Return all clients, or ``MAX_CLIENTS`` of them."""
    clients = [info.id for info in server.clients]
    step = max(1, len(clients) / MAX_CLIENTS)
    return [clients[int(place * step)] for place in range(min(len(clients), MAX_CLIENTS))]


def _numbers(moments: Moments, names: list[str]) -> dict[str, float]:
    variances = {name: moments.variance(name) for name in names}
    count = sum(value.numel() for value in variances.values())
    deviation = sum(float(value.sqrt().sum(dtype=torch.float64)) for value in variances.values()) / count
    variance = sum(float(value.sum(dtype=torch.float64)) for value in variances.values()) / count
    square = variance + sum(float(moments.mean[name].square().sum(dtype=torch.float64)) for name in names) / count
    return {"deviation": deviation, "relative": math.sqrt(variance / square) if square > 0 else 0.0}


SAMPLED_VALUES, WATCHED_CLIENTS = 32, 16


class StatisticsDrift:
    """Receives all training replies, and reports after each round how far the statistics moved."""

    def __init__(self, plan: Plan, server: Server, backend: Backend) -> None:
        self.names = [n for n, entry in plan.entries.items() if entry.kind == STATISTIC and entry.dtype.is_floating_point]
        self.sizes = {name: plan.entries[name].shape for name in self.names}
        self.received: dict[str, Tensor] = {}
        uploaded = set(self.names) <= set(plan.at(server.round).up)
        kept = {} if uploaded else self._kept(server, backend)
        self.before = torch.stack(list(kept.values())).mean(0) if kept else self._vector(server.state)

    def _vector(self, entries: Mapping[str, Tensor]) -> Tensor | None:
        """Return all statistics as one vector; None if some are missing or encoded."""
        if not self.names or any(n not in entries or entries[n].shape != self.sizes[n] for n in self.names):
            return None
        return torch.cat([entries[name].detach().reshape(-1).to("cpu", torch.float64) for name in self.names])

    def receive(self, request: Request, reply: Reply) -> None:
        found = self._vector(reply.entries if reply.decoded is None else reply.decoded) if request.what == "train" else None
        if found is not None:
            self.received[reply.client] = found

    def lines(self, server: Server, backend: Backend) -> list[Mapping[str, Any]]:
        """Return metrics lines: the change of the shared statistics in this round, and the distance of each client from their old value.

        ``change`` and ``distance`` are L1 norms; ``sample`` is a fixed, evenly spaced subset of the values of a client.
        """
        local, self.received = self.received, {}
        rejected = server.rejected
        local = {client: values for client, values in local.items() if client not in rejected}
        if local:
            now = self._vector(server.state)
        else:
            local = self._kept(server, backend)
            now = torch.stack(list(local.values())).mean(0) if local else None
        if now is None or not local:
            return []
        before, self.before = self.before, now
        base = now if before is None else before
        step = max(1, len(now) // SAMPLED_VALUES)
        common = {"round": server.round, "view": STATISTICS}
        watched = sorted(local)[:WATCHED_CLIENTS]
        return [
            {**common, "client": ALL, "change": float((now - base).abs().sum()), "values": len(now)},
            *(
                {
                    **common,
                    "client": client,
                    "distance": float((local[client] - base).abs().sum()),
                    "sample": [float(f"{value:.6g}") for value in local[client][::step][:SAMPLED_VALUES].tolist()],
                }
                for client in watched
            ),
        ]

    def _kept(self, server: Server, backend: Backend) -> dict[str, Tensor]:
        found = {}
        for client in few_clients(server) if self.names else ():
            kept = self._vector(backend.state_of(client).entries) if backend.can_read(client) else None
            if kept is not None:
                found[client] = kept
        return found
