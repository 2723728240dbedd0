"""What every round of training writes to the metrics, and a warning after round 1 if the loss is above the chance level.

Client spread: for each kind of entry that differs between clients, its deviation over clients. The models are those that clients would be
tested with: what the server sends to each, and what each keeps. Where all clients have the server's model, there is nothing to tell; where
clients keep their entries on other machines, it is not known here. Of many clients a few are looked at, always the same, so that a round
costs the same however many clients there are.

Statistics drift: how batch-norm statistics move, a few numbers for each round and client (FixBN Figure 2). Clients' statistics are those
they send after local training; where a method keeps them at clients, those they keep. The statistics they are compared with are the
server's before the round; where there are none, the clients' mean.
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
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.settings import AUTO

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun
    from polyfed.runs.experiment import Experiment

log = logging.getLogger("polyfed")

SPREAD, STATISTICS, NOTED = "spread", "statistics", "noted"
"""Views of the metrics: both of the above, and what a method logs in a round (``server.log_client_metric``)."""
ALL = "all"
"""The client of lines about all clients."""
OF_TRAINING = ("training", SPREAD, STATISTICS, NOTED)
"""Views of metrics that training writes; the others are scores."""
MARGIN = 1.1
"""A random model starts a few percent above the chance level."""


class TrainingMetrics(Callback):
    """Write losses, privacy spending, the spread of client models, the drift of statistics and the method's notes."""

    def __init__(self, run: ActiveRun) -> None:
        self.run, self.experiment = run, run.experiment
        if run.folder is not None:
            self.drift = StatisticsDrift(self.experiment.bench.plan, self.experiment.server, self.experiment.backend)
            self.experiment.on_reply = self.drift.hear

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
                *_noted_lines(server),
            ]
        )

    def _warn_of_loss(self, run: RunState) -> None:
        if run.round != 1 or not run.losses:
            return
        loss, start = statistics.fmean(run.losses.values()), start_of(self.experiment)
        if not math.isfinite(loss):
            problem = f"The training loss is {loss} after round 1."
        elif start is not None and loss > MARGIN * start:
            problem = f"The mean training loss of round 1 is {loss:.3g}, above its start ({start:.3g}, the chance level)."
        else:
            return
        log.warning("%s The learning rate may be too high. Try a third of it: --lr %.2g.", problem, run.settings.lr / 3)


def start_of(experiment: Experiment) -> float | None:
    """Return the loss of a model that knows nothing; None if the loss is not the task's, or something is added to it."""
    method, bench = experiment.method, experiment.bench
    changed = experiment.settings.loss != AUTO or "loss" in experiment.objects
    if changed or method.task_loss or method.batch_gradient or method.objective:
        return None
    return bench.task.chance_loss(bench.classes)


def _noted_lines(server: Server) -> list[Mapping[str, Any]]:
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
"""Of more clients than this, as many are looked at, evenly spaced over the list of clients."""

CHUNK = 1 << 18
"""Values that are worked on at a time."""


@dataclass
class Moments:
    """Mean and summed squared deviations of tensors over clients, one client after the other."""

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
        """Mean and variance of each value, some values at a time."""
        for mean, squares in _chunks(self.mean[name], self.squares[name]):
            yield mean, squares.clamp_min(0) / self.count[name]


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value, memory_format=torch.contiguous_format)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of tensors of one shape: temporary copies of whole models would take more time than the sums."""
    return zip(*(torch.split(tensor.flatten(), CHUNK) for tensor in tensors), strict=True)


def spread_lines(server: Server, backend: Backend, initial: Mapping[str, Tensor]) -> list[Mapping[str, Any]]:
    """A line of metrics for each kind of entry in which clients' models differ.

    ``deviation`` is the standard deviation of a value over clients, averaged over the values of this kind; ``relative`` is its root mean
    square as a share of the root mean square of the values themselves.
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
    """Of each client, the entries of its model that are not the server's own; nothing where they cannot be known."""
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
    """The clients that are looked at after a round: all, or as many as keep a round's cost the same whatever their number."""
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
    """Hears every reply of training, and says after a round how far statistics moved.

    Args:
        plan: names the statistics.
        server: as training begins or goes on.
        backend: has what clients keep.
    """

    def __init__(self, plan: Plan, server: Server, backend: Backend) -> None:
        self.names = [n for n, entry in plan.entries.items() if entry.kind == STATISTIC and entry.dtype.is_floating_point]
        self.sizes = {name: plan.entries[name].shape for name in self.names}
        self.heard: dict[str, Tensor] = {}
        uploaded = set(self.names) <= set(plan.at(server.round).up)
        kept = {} if uploaded else self._kept(server, backend)
        self.before = torch.stack(list(kept.values())).mean(0) if kept else self._vector(server.state)

    def _vector(self, entries: Mapping[str, Tensor]) -> Tensor | None:
        """All statistics in one row; None where some are missing, or encoded."""
        if not self.names or any(n not in entries or entries[n].shape != self.sizes[n] for n in self.names):
            return None
        return torch.cat([entries[name].detach().reshape(-1).to("cpu", torch.float64) for name in self.names])

    def hear(self, request: Request, reply: Reply) -> None:
        found = self._vector(reply.entries if reply.decoded is None else reply.decoded) if request.what == "train" else None
        if found is not None:
            self.heard[reply.client] = found

    def lines(self, server: Server, backend: Backend) -> list[Mapping[str, Any]]:
        """Lines of metrics: the change of the common statistics in this round, and each client's distance from them before it.

        ``change`` and ``distance`` are L1 norms; ``sample`` holds some of the client's values, always the same, evenly chosen.
        """
        local, self.heard = self.heard, {}
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
