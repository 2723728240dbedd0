"""Replay recorded client replies with changes, to test how a method and the server handle bad replies without training again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyfed.core import evaluation
from polyfed.core.evaluation import Newcomer
from polyfed.core.rounds import Observer, Reply, Request, SendRequest, run_exchange, run_rounds
from polyfed.runs.experiment import Experiment, threads
from polyfed.runs.folder.checkpoint import copied
from polyfed.trees import leaves_in

Change: TypeAlias = Callable[[Request, Reply], Reply]
DEPTH = 5_000


class Replay:
    """Records the replies of an experiment; each ``run`` repeats its training and evaluation with some replies changed."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.start = copied(experiment.snapshot())
        self.seen: list[tuple[Request, list[Reply]]] = []
        self.recorded: dict[tuple[str, int, str], list[Reply]] = {}
        self.used: dict[tuple[str, int, int, str], int] = {}

    def train(self, send_request: SendRequest, observers: Sequence[Observer] = ()) -> None:
        """Run the setup and all rounds."""
        made = self.experiment
        with threads(made.settings.threads):
            run_rounds(made.method, made.server, made.backend, made.checked_sender(send_request), made.settings.rounds, observers)

    def evaluate(self, send_request: SendRequest) -> None:
        """Score seen clients and newcomers."""
        made, sender = self.experiment, self.experiment.checked_sender(send_request)
        with threads(made.settings.threads):
            run_exchange(evaluation.seen(made.server), sender)
            for examples in made.federation.unseen.values():
                target = evaluation.inputs_of(made.bench, examples)
                newcomer: Newcomer = run_exchange(
                    evaluation.newcomer(made.server, made.bench, made.settings.newcomer, target), sender
                )
                evaluation.score_newcomer(made.bench, newcomer, examples)

    def record(self, request: Request) -> Iterator[Reply]:
        """Send a request, and record the replies."""
        replies: list[Reply] = []
        self.seen.append((request, replies))
        for reply in self.experiment.backend(request):
            replies.append(reply)
            self.recorded.setdefault((request.what, request.round, reply.client), []).append(reply)
            yield reply

    def run(self, change: Change) -> None:
        """Train and evaluate from the start, with changed replies."""
        self.experiment.restore(copied(self.start))
        self.used.clear()

        def changed(request: Request) -> Iterator[Reply]:
            return (change(request, reply) for reply in self._recorded_replies(request))

        self.train(changed)
        self.evaluate(changed)

    def is_finite(self) -> bool:
        """Return True if all server state is finite."""
        server = self.experiment.server
        return all(map(_is_finite, leaves_in([server.state, server.memory_state()])))

    def _recorded_replies(self, request: Request) -> Iterator[Reply]:
        for client in request.payloads:
            key = (request.what, request.round, request.attempt, client)
            number = self.used[key] = self.used.get(key, -1) + 1
            replies = self.recorded.get((request.what, request.round, client), [])
            if number < len(replies):
                yield replies[number]


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def with_extras(reply: Reply, extras: Mapping[str, Any]) -> Reply:
    return replace(reply, payload=replace(reply.payload, extras=extras))


def bad_replies(honest: Reply, name: str) -> dict[str, Reply]:
    """Map descriptions to bad replies, in which one extra is missing or replaced."""
    without = {key: value for key, value in honest.extras.items() if key != name}
    others = {what: {**honest.extras, name: value} for what, value in mutations(honest.extras[name])}
    return {what: with_extras(honest, extras) for what, extras in {"missing": without, **others}.items()}


def with_one_replaced(what: str, bad: Reply) -> Change:
    """Replace the reply of one client to one kind of request in all rounds."""
    return lambda request, reply: bad if (request.what, reply.client) == (what, bad.client) else reply


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values that a hostile or broken client might send instead, each with its description."""
    yield from (("None", None), ("text", "text"), ("an empty list", []), ("an empty mapping", {}), ("not a number", math.nan))
    yield from (("infinite", -math.inf), ("10**400", 10**400), ("-1e30", -1e30), ("1e308", 1e308), ("-1", -1), ("True", True))
    yield from (
        ("nested deeply", nested_deep()),
        ("a scalar tensor", torch.tensor(1.0)),
        ("a sparse tensor", torch.eye(2).to_sparse()),
    )
    if isinstance(value, Tensor):
        yield from _mutated_tensors(value)
    elif isinstance(value, Mapping) and value:
        first = next(iter(value))
        yield "without its first part", {key: item for key, item in value.items() if key != first}
        yield "with an additional part", {**value, "unknown": value[first]}
        yield "with a key that is not text", {**value, 7: value[first]}
        for what, bad in mutations(value[first]):
            yield f"a mapping whose first part is {what}", {**value, first: bad}
    elif isinstance(value, list | tuple) and value:
        for what, bad in mutations(value[0]):
            yield f"a list whose first item is {what}", [bad, *value[1:]]


def _mutated_tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "of a different shape", torch.zeros(*value.shape, 2, dtype=value.dtype)
    yield "without its last values", value.flatten()[:-1]
    yield "in double precision", value.double() if value.dtype != torch.float64 else value.float()
    yield "of integers", torch.zeros_like(value, dtype=torch.int32)
    yield "on the device meta", value.to("meta")
    if value.is_floating_point():
        for number in (math.nan, math.inf, torch.finfo(value.dtype).max, -torch.finfo(value.dtype).max):
            yield f"full of {number}", torch.full_like(value, number)


def nested_deep() -> list[Any]:
    """Return nested lists, deeper than the recursion limit."""
    tree: list[Any] = []
    for _ in range(DEPTH):
        tree = [tree]
    return tree
