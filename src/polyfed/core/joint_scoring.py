"""Clients with one and the same model are scored in one pass over all their examples.

Scored one by one, a client with a few examples costs as much as one with a hundred: loading the model, a small batch, and a few dozen
small sums. Here neighbours share a test batch, if that costs less than trying it. That this changes no score is tried at every batch: the predictions of its first and its
last client must be those that they get when they are alone. Where they are not (statistics of the batch, random predictions), and wherever
anything fails, clients are scored one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client, predicted, scored_parts
from polyfed.core.conversation import Payload
from polyfed.core.data_types import ClientData
from polyfed.core.device import CPU, sent_to
from polyfed.core.seeds import default_stream
from polyfed.core.workbench import Workbench

MANY = 100
"""In detail, fewer clients are scored one by one: answers to single images and the AUROC are kept then. So are those of tasks without class
labels, whose answers may change with the last digit of a prediction."""
REPAID = 3
"""Each client beyond the third saves as much CPU time as this many images cost (measured for small_cnn and six_layer_cnn at 16 to 28 pixels)."""
MARGIN = 2e-4
"""If the two largest probabilities of an image differ by less, its answer might depend on the batch: its client is scored alone."""
TOLERANCE = 1e-4
"""By how much a probability may differ in a batch of another size; sums of float32 in another order differ by about 1e-7."""


def neighbours(clients: Sequence[ClientData], question: Mapping[str, Any], bench: Workbench) -> Iterator[Sequence[ClientData]]:
    """Yield clients in their order, in groups whose examples fit into one test batch; one by one if a group does not pay.

    In detail every group is shared: which clients have answers and an AUROC does not depend on what pays.
    """
    largest, split, in_detail = bench.test_batch_size, question["split"], bool(question.get("detail", False))
    group: list[ClientData] = []
    sizes: list[int] = []
    for client in clients:
        tests = (client.validation,) if split == "validation" else client.tests.values()
        size = sum(len(examples) for examples in tests if examples is not None)
        if group and sum(sizes) + size > largest:
            yield from [group] if in_detail or pays(sizes) else ([one] for one in group)
            group, sizes = [], []
        group.append(client)
        sizes.append(size)
    yield from [group] if in_detail or pays(sizes) else ([one] for one in group)


def pays(sizes: Sequence[int]) -> bool:
    """Return True if one pass over these clients costs less than one pass for each, although the first and last are scored twice.

    >>> pays([8] * 20), pays([100, 100]), pays([])
    (True, False, False)
    """
    return len(sizes) > 3 and sizes[0] + sizes[-1] <= 2 * REPAID * (len(sizes) - 3)


def evaluate_together(clients: Sequence[Client], payload: Payload) -> list[Payload | None] | None:
    """Return the replies of these clients to ``evaluate``, in one batch; None for a client that is scored alone, or if all of them are."""
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
def _answers(clients: Sequence[Client], split: str, in_detail: bool) -> list[Payload | None] | None:
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
    unclear = near_ties(together) if bench.task.class_labels and not in_detail else torch.zeros(len(y), dtype=torch.bool)
    alone = [bool(rows.any()) for rows in torch.split(unclear, [sum(map(len, found.values())) for found in by_client])]
    results = iter(bench.task.results_of_parts(together, y, [len(examples) for examples in parts], bench.classes, in_detail))
    answers = [Payload(extras={"scores": {domain: next(results) for domain in found}}) for found in by_client]
    return [None if is_alone else found for found, is_alone in zip(answers, alone, strict=True)]


def near_ties(probabilities: Tensor) -> Tensor:
    """Mark the images whose answer is not clear enough to be the same in a batch of another size."""
    if probabilities.shape[1] < 2:
        return torch.zeros(len(probabilities), dtype=torch.bool)
    first, second = probabilities.topk(2, dim=1).values.unbind(dim=1)
    return first - second < MARGIN


def _predicted(bench: Workbench, x: Tensor) -> Tensor:
    return predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU)
