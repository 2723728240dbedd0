"""Many clients with one and the same model are scored in one pass over all their examples.

Scored one by one, a client with a few examples costs as much as one with a hundred: loading the model, a small batch, and a few dozen
small sums. Here neighbours share a test batch. That this changes no score is tried at every batch: the predictions of its first and its
last client must be those that they get when they are alone. Where they are not (statistics of the batch, random predictions), and wherever
anything fails, clients are scored one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client, predicted, scored_parts
from polyfed.core.conversation import Payload
from polyfed.core.data_types import ClientData
from polyfed.core.device import CPU, sent_to
from polyfed.core.seeds import default_stream
from polyfed.core.workbench import Workbench

MANY = 100
"""Fewer clients are scored one by one: there is little to gain, and every digit of their scores stays as it was."""
TOLERANCE = 1e-4
"""By how much a probability may differ in a batch of another size; sums of float32 in another order differ by about 1e-7."""


def neighbours(clients: Sequence[ClientData], split: str, bench: Workbench) -> Iterator[Sequence[ClientData]]:
    """Clients in their order, in groups whose examples fit into one test batch; a client with more is a group by itself."""
    largest = bench.test_batch_size
    group: list[ClientData] = []
    taken = 0
    for client in clients:
        tests = (client.validation,) if split == "validation" else client.tests.values()
        size = sum(len(examples) for examples in tests if examples is not None)
        if group and taken + size > largest:
            yield group
            group, taken = [], 0
        group.append(client)
        taken += size
    if group:
        yield group


def evaluate_together(clients: Sequence[Client], payload: Payload) -> list[Payload] | None:
    """The answers of these clients to ``evaluate``, in one batch; None where each has to answer by itself."""
    first, bench = clients[0], clients[0].bench
    if len(clients) == 1 or not may_share(clients, payload):
        return None
    try:
        with default_stream(bench.settings.seed, "answer", first.round, first.id, device=bench.device):
            first.receive(payload.entries)
            return _answers(clients, payload.extras.get("split", "test"), bool(payload.extras.get("detail", False)))
    except Exception:  # each client by itself says what is wrong, and with whom
        return None


def may_share(clients: Sequence[Client], payload: Payload) -> bool:
    """Whether these clients have the same model, and predict in single precision."""
    bench = clients[0].bench
    unsent = bench.live.keys() - payload.entries.keys()
    return (
        bench.settings.amp == "off"
        and "evaluate" not in bench.method.answers
        and not bench.method.receiving
        and all(unsent.isdisjoint(client.state.entries) for client in clients)
    )


@torch.no_grad()
def _answers(clients: Sequence[Client], split: str, in_detail: bool) -> list[Payload] | None:
    bench = clients[0].bench
    by_client = [scored_parts(client.data, split) for client in clients]
    parts = [examples for found in by_client for examples in found.values()]
    pairs = [examples.batch(slice(None)) for examples in parts]
    if len({x.dtype for x, _ in pairs}) > 1:  # joined, bytes would become numbers that nobody scales
        return None
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    if len(y) > bench.test_batch_size:
        return None
    bench.model.eval()
    together = _predicted(bench, x)
    first, last = (sum(map(len, by_client[place].values())) for place in (0, -1))
    for rows in (slice(0, first), slice(len(y) - last, len(y))):
        if not torch.allclose(together[rows], _predicted(bench, x[rows]), rtol=0, atol=TOLERANCE):
            return None
    results = iter(bench.task.results_of_parts(together, y, [len(examples) for examples in parts], bench.classes, in_detail))
    return [Payload(extras={"scores": {domain: next(results) for domain in found}}) for found in by_client]


def _predicted(bench: Workbench, x: Tensor) -> Tensor:
    return predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU)
