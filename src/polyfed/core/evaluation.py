"""Evaluation as exchanges: each seen client's model on its domains, and the newcomer model on unseen domains.

The two views are never mixed. A newcomer is a client that did not take part in training. ``--newcomer`` selects how its local
layers are built. If this needs values from clients, a separate request collects them, whose traffic is counted separately.

If all models are equal, the scored clients cover all test data; otherwise all clients are scored, or a seeded sample. Clients with the same
model share test batches, since scoring a client with a few examples costs as much as one with a hundred. Every shared batch is verified: the
predictions for its first and its last client must equal those for the client alone. If they differ (batch statistics, random predictions), or
if anything fails, clients are scored one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client, predicted, score, scored_parts
from polyfed.core.data_types import ClientData, Examples, in_batches
from polyfed.core.entries import STATISTIC, estimate_statistics
from polyfed.core.reducers import Entries, Reduction, by_type
from polyfed.core.rounds import EVALUATION, NEWCOMER, Exchange, Payload, Request
from polyfed.core.seeds import chooser, default_stream
from polyfed.core.server import Server
from polyfed.core.workbench import CPU, Workbench, sent_to
from polyfed.errors import DataError, TooFewReplies
from polyfed.tasks.task import TaskScores

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.server import ClientInfo, Server
    from polyfed.core.sharing import Plan


def scored_clients(server: Server, split: str = "test") -> list[str]:
    """Return the ids of the clients to score, in canonical order. They are the same after every round."""
    if not models_are_equal(server.method, server.plan):
        return sample_to_score(server.clients, server.settings.evaluate_clients, server.settings.seed)
    if split == "validation":
        return [info.id for info in server.clients]
    return covering(server.clients)


def models_are_equal(method: Method, plan: Plan) -> bool:
    """Return True if all clients have the server's model."""
    return not plan.has_local_entries and method.outgoing is None and not method.receiving


def covering(clients: Sequence[ClientInfo]) -> list[str]:
    covered: set[Hashable] = set()
    chosen = []
    for info in clients:
        if not info.test_set_ids <= covered:
            covered |= info.test_set_ids
            chosen.append(info.id)
    return chosen


def sample_to_score(clients: Sequence[ClientInfo], most: int, seed: int) -> list[str]:
    """Sample ``most`` clients (0: all), in proportion to the domains, with at least one client per domain."""
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


MANY = 100
"""Fewer clients than this are scored one by one if details are requested (predictions for single images and the AUROC), or if the task has
no class labels, because the last digit of an output may then change its predictions."""
REPAID = 3
"""CPU time that each client beyond the third saves in a shared batch, in images (measured for small_cnn and six_layer_cnn at 16 to 28 pixels)."""
MARGIN = 2e-4
"""If the two largest probabilities of an image differ by less, the prediction may depend on the batch: its client is scored alone."""
TOLERANCE = 1e-4
"""Largest difference of a probability between batches of different sizes; reordered float32 sums differ by about 1e-7."""


def neighbours(clients: Sequence[ClientData], question: Mapping[str, Any], bench: Workbench) -> Iterator[Sequence[ClientData]]:
    """Yield clients in order, in groups whose examples fit into one test batch, or one by one if a group would not save time.

    If details are requested, all groups share batches, so that the cost does not decide which clients get predictions and an AUROC.
    """
    largest, split, in_detail = bench.test_batch_size, question["split"], bool(question.get("detail", False))
    group: list[ClientData] = []
    sizes: list[int] = []
    for client in clients:
        tests = (client.validation,) if split == "validation" else client.tests.values()
        size = sum(len(examples) for examples in tests if examples is not None)
        if group and sum(sizes) + size > largest:
            yield from [group] if in_detail or saves_time(sizes) else ([one] for one in group)
            group, sizes = [], []
        group.append(client)
        sizes.append(size)
    yield from [group] if in_detail or saves_time(sizes) else ([one] for one in group)


def saves_time(sizes: Sequence[int]) -> bool:
    """Return True if one pass over these clients costs less than one pass for each, although the first and last are scored twice.

    >>> saves_time([8] * 20), saves_time([100, 100]), saves_time([])
    (True, False, False)
    """
    return len(sizes) > 3 and sizes[0] + sizes[-1] <= 2 * REPAID * (len(sizes) - 3)


def evaluate_together(clients: Sequence[Client], payload: Payload) -> list[Payload | None] | None:
    """Return the replies of these clients to ``evaluate``, computed in one batch; None for clients to score alone."""
    first, bench = clients[0], clients[0].bench
    if len(clients) == 1 or not can_share_batch(clients, payload):
        return None
    try:
        with default_stream(bench.settings.seed, "answer", first.round, first.id, device=bench.device):
            first.receive(payload.entries)
            return _answers(clients, payload.extras.get("split", "test"), bool(payload.extras.get("detail", False)))
    except Exception:  # scoring the clients one by one reports which client fails
        return None


def can_share_batch(clients: Sequence[Client], payload: Payload) -> bool:
    """Return True if these clients have the same model, and predict in single precision."""
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
    if len({x.dtype for x, _ in pairs}) > 1:  # concatenated with floats, bytes would not be scaled
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
    """Mark the examples whose prediction may differ in a batch of another size."""
    if probabilities.shape[1] < 2:
        return torch.zeros(len(probabilities), dtype=torch.bool)
    first, second = probabilities.topk(2, dim=1).values.unbind(dim=1)
    return first - second < MARGIN


def _predicted(bench: Workbench, x: Tensor) -> Tensor:
    return predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU)


@dataclass(frozen=True)
class Row:
    """Scores of one client's model on one domain. ``client`` is "newcomer" on unseen domains."""

    view: str
    client: str
    domain: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Newcomer:
    """Models for a newcomer, with weights. ``score``: average their outputs ("ensemble") or their scores ("mean_of_models")."""

    models: Sequence[tuple[float, Mapping[str, Tensor]]]
    score: str = "ensemble"


def seen(server: Server, split: str = "test", in_detail: bool = False) -> Exchange[list[Row]]:
    """Request the scores of the clients' models; ``in_detail`` adds the confusion matrix and the AUROC."""
    for prepare in server.method.before_evaluation:
        yield from prepare(server)
    clients = scored_clients(server, split)
    extras: dict[str, Any] = {"split": split, **({"detail": True} if in_detail else {})}
    enough = MANY if in_detail or not server.task.class_labels else 2
    together = len(clients) >= enough and models_are_equal(server.method, server.plan)
    if together:
        payloads = dict.fromkeys(clients, Payload(server.outgoing(""), extras))
    else:
        payloads = {client: Payload(server.outgoing(client), extras) for client in clients}
    replies = yield Request("evaluate", payloads, EVALUATION, server.round, together=together)
    return [Row("seen" if split == "test" else split, r.client, d, n) for r in replies for d, n in r.extras["scores"].items()]


def newcomer(server: Server, bench: Workbench, choice: str, target: Callable[[], Iterator[Tensor]]) -> Exchange[Newcomer]:
    """Build the models for a newcomer.

    Args:
        server: Server state to start from.
        bench: Workbench to run models on.
        choice: averaged, re-estimated, nearest or ensemble.
        target: Yields batches of the newcomer's inputs, preprocessed, without labels, on the workbench's device.
    """
    for prepare in server.method.before_evaluation:
        yield from prepare(server)
    if server.method.newcomer is not None:
        made: Newcomer = yield from own_newcomer(server)
        return made
    if choice in ("averaged", "re-estimated"):
        state = yield from averaged_state(server)
        return Newcomer([(1.0, state if choice == "averaged" else re_estimated(bench, state, target()))])
    states = yield from client_states(server)
    if choice == "nearest":
        return Newcomer([(1.0, states[nearest_client(bench, states, target)])])
    return Newcomer([(1.0 / len(states), state) for state in states.values()])


def own_newcomer(server: Server) -> Exchange[Newcomer]:
    """Return the method's newcomer models, or those saved while its clients were still reachable."""
    assert server.method.newcomer is not None
    if server.saved_newcomer is not None:
        return server.saved_newcomer
    made: Newcomer = yield from server.method.newcomer(server)
    return made


def inputs_of(bench: Workbench, examples: Examples) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields preprocessed inputs in batches of at least two if possible, since some norms need two."""

    def target() -> Iterator[Tensor]:
        batches = in_batches(examples, bench.settings.test_batch_size, minimum=2)
        return (bench.preparation.for_testing(sent_to(x, bench.device)) for x, _ in batches)

    return target


def _request_entries(server: Server, names: Sequence[str]) -> Request:
    payload = Payload(extras={"names": list(names)})
    return Request("entries", dict.fromkeys((info.id for info in server.clients), payload), NEWCOMER, server.round)


def averaged_state(server: Server) -> Exchange[Entries]:
    """Return the server's state, with local entries averaged over the clients that have trained."""
    names = server.plan.local_names
    if not names or server.averaged_local_entries:
        return server.state | server.averaged_local_entries
    reduction = Reduction(by_type({name: server.plan.entries[name].dtype for name in names}))
    replies = yield _request_entries(server, names)
    any_reply = False
    for reply in replies:
        any_reply = True
        if not reply.extras["untrained"]:
            reduction.add(reply.entries, server.weight(reply))
    if not any_reply:
        raise TooFewReplies("Cannot build a newcomer model: no client sent its local layers.")
    return server.state | reduction.finish()


def client_states(server: Server) -> Exchange[dict[str, Entries]]:
    """Return the model of every trained client. Shared tensors are stored once."""
    if not server.plan.has_local_entries and server.method.outgoing is None:
        return {"server": dict(server.state)}
    replies = yield _request_entries(server, server.plan.unsent_names)
    states = {
        reply.client: server.state | server.outgoing(reply.client) | dict(reply.entries)
        for reply in replies
        if not reply.extras["untrained"]
    }
    return states or {"server": dict(server.state)}


@torch.no_grad()
def re_estimated(bench: Workbench, state: Mapping[str, Tensor], target: Iterator[Tensor]) -> Entries:
    """Return the state with batch-norm statistics estimated on the newcomer's inputs (mean over batches, weighted by size)."""
    bench.load(_model_entries(bench, state))
    estimate_statistics(bench.model, target, "samples", functools.partial(_pass, bench.model))
    return {name: value.detach().to(CPU, copy=True) for name, value in bench.live.items()}


def _pass(model: nn.Module, x: Tensor) -> None:
    try:
        model(x)
    except ValueError as error:
        if len(x) > 1:
            raise
        raise DataError(
            f"Statistics cannot be estimated from one input: {error} Pass two or more inputs, or use --newcomer averaged or ensemble."
        ) from error


def nearest_client(bench: Workbench, states: Mapping[str, Mapping[str, Tensor]], target: Callable[[], Iterator[Tensor]]) -> str:
    """Return the client whose model fits the target best, without labels.

    If clients have local statistics, it is the client whose statistics are nearest to those of the target under its weights (mean symmetric
    divergence of the channels' Gaussians). Otherwise it is the client with the most confident predictions (lowest mean entropy).
    """
    local_statistics = [n for n, e in bench.plan.entries.items() if e.kind == STATISTIC and n in bench.plan.unsent_names]
    judge = _statistics_distance if local_statistics else _mean_entropy
    distances = {client: judge(bench, state, target()) for client, state in states.items()}
    return min(sorted(distances), key=lambda client: distances[client])


def _statistics_distance(bench: Workbench, state: Mapping[str, Tensor], target: Iterator[Tensor]) -> float:
    own = re_estimated(bench, state, target)
    total, channels = 0.0, 0
    for name in own:
        if not name.endswith("running_mean"):
            continue
        variance = name.removesuffix("mean") + "var"
        a, b = own[variance] + 1e-5, state[variance] + 1e-5
        gap = (own[name] - state[name]).square()
        total += float(((a / b + b / a) / 4 + gap * (1 / a + 1 / b) / 4 - 0.5).sum())
        channels += gap.numel()
    return total / max(channels, 1)


@torch.no_grad()
def _mean_entropy(bench: Workbench, state: Mapping[str, Tensor], target: Iterator[Tensor]) -> float:
    bench.load(_model_entries(bench, state))
    bench.model.eval()
    entropies = [bench.task.entropy(predicted(bench, x)) for x in target]
    return float(torch.cat(entropies).mean())


def _model_entries(bench: Workbench, state: Mapping[str, Tensor]) -> Entries:
    return {name: value for name, value in state.items() if name in bench.live}


@torch.no_grad()
def score_newcomer(
    bench: Workbench, made: Newcomer, examples: Examples, domain: str = "", in_detail: bool = False
) -> dict[str, Any]:
    if made.score == "mean_of_models":
        return mean_numbers([_score_one(bench, state, examples, in_detail).results() for _, state in made.models])
    if len(made.models) == 1:
        scores = _score_one(bench, made.models[0][1], examples, in_detail)
    else:
        total = sum(weight * _all_predicted(bench, state, examples) for weight, state in made.models)
        scores = bench.task.scores(bench.classes, in_detail)
        scores.add(torch.as_tensor(total), examples.labels)
    bench.note_answers("unseen", "newcomer", domain, scores)
    return scores.results()


def _score_one(bench: Workbench, state: Mapping[str, Tensor], examples: Examples, in_detail: bool = False) -> TaskScores:
    bench.load(_model_entries(bench, state))
    return score(bench, examples, in_detail)


def _all_predicted(bench: Workbench, state: Mapping[str, Tensor], examples: Examples) -> Tensor:
    bench.load(_model_entries(bench, state))
    bench.model.eval()
    batches = in_batches(examples, bench.test_batch_size)
    return torch.cat([predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU) for x, _ in batches])


def mean_numbers(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each number that occurs in all score records."""
    shared = [key for key in many[0] if all(key in numbers for numbers in many)]
    return {key: _mean([numbers[key] for numbers in many]) for key in shared}


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [_mean(items) for items in zip(*values, strict=True)]
    return sum(map(float, values)) / len(values)
