"""Evaluation, as conversations: each seen client's own model on its domains, and the newcomer model on unseen domains.

The two views are never mixed. What a newcomer gets for layers that are local is a choice; their values are collected by a
question of their own, only when a newcomer is asked for, and counted apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.batch_norm import estimate_statistics
from polyfed.core.client import predicted, score
from polyfed.core.conversation import EVALUATION, NEWCOMER, Ask, Payload, Talk
from polyfed.core.data_types import Examples, in_batches
from polyfed.core.device import CPU, sent_to
from polyfed.core.entries import STATISTIC
from polyfed.core.joint_scoring import MANY
from polyfed.core.reducers import Entries, Reduction, by_type
from polyfed.core.scored_clients import models_are_equal, scored_clients
from polyfed.core.server import Server
from polyfed.core.tasks.task import TaskScores
from polyfed.core.workbench import Workbench
from polyfed.errors import DataError, TooFewReplies


@dataclass(frozen=True)
class Row:
    """The scores of one client's model on one domain; ``client`` is "newcomer" on unseen domains."""

    view: str
    client: str
    domain: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Newcomer:
    """Models for somebody never trained on. ``score`` says whether their outputs are averaged (ensemble) or their scores are (mean_of_models)."""

    models: Sequence[tuple[float, Mapping[str, Tensor]]]
    score: str = "ensemble"


def seen(server: Server, split: str = "test", in_detail: bool = False) -> Talk[list[Row]]:
    """Ask clients to score their own models; in detail, with the confusion matrix and the AUROC."""
    for prepare in server.method.before_evaluation:
        yield from prepare(server)
    clients = scored_clients(server, split)
    question: dict[str, Any] = {"split": split, **({"detail": True} if in_detail else {})}
    enough = MANY if in_detail or not server.task.class_labels else 2
    together = len(clients) >= enough and models_are_equal(server.method, server.plan)
    if together:
        payloads = dict.fromkeys(clients, Payload(server.outgoing(""), question))
    else:
        payloads = {client: Payload(server.outgoing(client), question) for client in clients}
    replies = yield Ask("evaluate", payloads, EVALUATION, server.round, together=together)
    return [Row("seen" if split == "test" else split, r.client, d, n) for r in replies for d, n in r.extras["scores"].items()]


def newcomer(server: Server, bench: Workbench, choice: str, target: Callable[[], Iterator[Tensor]]) -> Talk[Newcomer]:
    """The models a newcomer gets.

    Args:
        server: whose state it starts from.
        bench: where models are tried.
        choice: averaged, re-estimated, nearest or ensemble.
        target: gives the newcomer's own inputs on the bench's device, prepared, without labels, a batch at a time.
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


def own_newcomer(server: Server) -> Talk[Newcomer]:
    """What the method itself gives a newcomer, or gave it when clients could still be asked."""
    assert server.method.newcomer is not None
    if server.left is not None:
        return server.left
    made: Newcomer = yield from server.method.newcomer(server)
    return made


def inputs_of(bench: Workbench, examples: Examples) -> Callable[[], Iterator[Tensor]]:
    """Gives a newcomer's inputs, prepared, a batch at a time; none of one input, which some norms cannot take, if it can be helped."""

    def target() -> Iterator[Tensor]:
        batches = in_batches(examples, bench.settings.test_batch_size, least=2)
        return (bench.preparation.for_testing(sent_to(x, bench.device)) for x, _ in batches)

    return target


def _ask_for_entries(server: Server, names: Sequence[str]) -> Ask:
    question = Payload(extras={"names": list(names)})
    return Ask("entries", dict.fromkeys((info.id for info in server.clients), question), NEWCOMER, server.round)


def averaged_state(server: Server) -> Talk[Entries]:
    """The server's state, with entries that are local averaged over the clients that have trained."""
    names = server.plan.local_names
    if not names or server.averaged:
        return server.state | server.averaged
    reduction = Reduction(by_type({name: server.plan.entries[name].dtype for name in names}))
    replies = yield _ask_for_entries(server, names)
    answered = False
    for reply in replies:
        answered = True
        if not reply.extras["untrained"]:
            reduction.add(reply.entries, server.weight(reply))
    if not answered:
        raise TooFewReplies("No client has sent the layers it keeps, so there is no average of them for a newcomer.")
    return server.state | reduction.finish()


def client_states(server: Server) -> Talk[dict[str, Entries]]:
    """Every trained client's own model; what is shared is stored once."""
    if not server.plan.has_local_entries and server.method.outgoing is None:
        return {"server": dict(server.state)}
    replies = yield _ask_for_entries(server, server.plan.unsent_names)
    states = {
        reply.client: server.state | server.outgoing(reply.client) | dict(reply.entries)
        for reply in replies
        if not reply.extras["untrained"]
    }
    return states or {"server": dict(server.state)}


@torch.no_grad()
def re_estimated(bench: Workbench, state: Mapping[str, Tensor], target: Iterator[Tensor]) -> Entries:
    """The state with batch-norm statistics estimated on the newcomer's own inputs (a mean over batches, by their sizes)."""
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
            f"Statistics cannot be estimated from one input: {error} Give two or more, or choose --newcomer averaged or ensemble."
        ) from error


def nearest_client(bench: Workbench, states: Mapping[str, Mapping[str, Tensor]], target: Callable[[], Iterator[Tensor]]) -> str:
    """The client whose model suits the target best, judged without labels.

    Where clients hold statistics of their own, the one whose statistics are nearest to those of the target under its own weights
    (symmetric divergence of the channels' Gaussians, averaged); else the one that is surest of its answers (lowest mean entropy).
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
    entropies = [bench.task.doubt(predicted(bench, x)) for x in target]
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
    """The mean of several scores, number by number, over those that all of them have."""
    shared = [key for key in many[0] if all(key in numbers for numbers in many)]
    return {key: _mean([numbers[key] for numbers in many]) for key in shared}


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [_mean(items) for items in zip(*values, strict=True)]
    return sum(map(float, values)) / len(values)
