"""Which clients are scored: where all models are equal, enough to cover all test data; else all, or a sample drawn by the seed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from polyfed.core.seeds import chooser

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.server import ClientInfo, Server
    from polyfed.core.sharing import Plan


def scored_clients(server: Server, split: str = "test") -> list[str]:
    """Ids of the clients to ask for scores, in the fixed order; the same ones after every round."""
    if not models_are_equal(server.method, server.plan):
        return sample_to_score(server.clients, server.settings.evaluate_clients, server.settings.seed)
    if split == "validation":
        return [info.id for info in server.clients]
    return covering(server.clients)


def models_are_equal(method: Method, plan: Plan) -> bool:
    """Whether all clients have the server's model."""
    return not plan.has_local_entries and method.outgoing is None and not method.receiving


def covering(clients: Sequence[ClientInfo]) -> list[str]:
    covered: set[Hashable] = set()
    chosen = []
    for info in clients:
        if not info.tests <= covered:
            covered |= info.tests
            chosen.append(info.id)
    return chosen


def sample_to_score(clients: Sequence[ClientInfo], most: int, seed: int) -> list[str]:
    """``most`` clients (0: all), from each domain by its share of the clients; at least one from each, even if these are more."""
    if not most or len(clients) <= most:
        return [info.id for info in clients]
    by_domain: dict[tuple[str, ...], list[str]] = {}
    for info in sorted(clients, key=lambda info: info.id):
        by_domain.setdefault(info.domains, []).append(info.id)
    exact = {domain: most * len(ids) / len(clients) for domain, ids in by_domain.items()}
    counts = {domain: max(1, int(share)) for domain, share in exact.items()}
    for domain in sorted(exact, key=lambda domain: (int(exact[domain]) - exact[domain], domain)):
        if sum(counts.values()) < most and exact[domain] > counts[domain]:
            counts[domain] += 1
    drawn = {name for domain, ids in by_domain.items() for name in chooser(seed, "score", *domain).sample(ids, counts[domain])}
    return [info.id for info in clients if info.id in drawn]
