"""How batch-norm statistics move while a run is trained: a few numbers for each round and client (FixBN Figure 2).

Clients' statistics are those they send after local training; where a method keeps them at clients, those they keep. The statistics they
are compared with are the server's before the round; where there are none, the clients' mean. Of many clients that keep theirs, a few
are looked at, always the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.backends.base import Backend
from polyfed.core.conversation import Ask, Reply
from polyfed.core.entries import STATISTIC
from polyfed.core.server import Server
from polyfed.core.sharing import Plan
from polyfed.runs.callbacks.client_spread import few_clients

STATISTICS, ALL = "statistics", "all"
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

    def hear(self, ask: Ask, reply: Reply) -> None:
        """Note what a client sent after training."""
        found = self._vector(reply.entries if reply.decoded is None else reply.decoded) if ask.what == "train" else None
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
