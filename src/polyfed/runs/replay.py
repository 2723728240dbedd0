"""A run whose replies are recorded once and given again, changed: how a method and the server stand bad replies, without training again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyfed.core import evaluation
from polyfed.core.conversation import Ask, Replies, Reply, converse
from polyfed.core.evaluation import Newcomer
from polyfed.core.loop import hold
from polyfed.core.trees import leaves_in
from polyfed.runs.experiment import Experiment, threads
from polyfed.runs.folder.checkpoint import copied

Change: TypeAlias = Callable[[Ask, Reply], Reply]
DEPTH = 5_000


class Replay:
    """An experiment that was trained and scored once; each ``run`` is the same again, with some replies changed."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.start = copied(experiment.snapshot())
        self.recorded: dict[tuple[str, int, str], list[Reply]] = {}
        self.given: dict[tuple[str, int, int, str], int] = {}
        self._hold(self._record)

    def run(self, change: Change) -> None:
        """Hold the setup, all rounds and an evaluation again, with the replies changed on their way."""
        self.experiment.restore(copied(self.start))
        self.given.clear()
        self._hold(lambda ask: (change(ask, reply) for reply in self._recorded_replies(ask)))

    def extras(self) -> Iterator[tuple[str, str, str]]:
        """Question, first client and name of every extra in a reply to training or to a question of the method's own."""
        seen = set()
        for (question, _, client), replies in self.recorded.items():
            for name in dict.fromkeys(name for reply in replies for name in reply.extras):
                if question not in ("evaluate", "entries") and (question, name) not in seen:
                    seen.add((question, name))
                    yield question, client, name

    def reply_with(self, question: str, client: str, name: str) -> Reply:
        """The first reply of a client to a question that has this extra."""
        several = (replies for (what, _, who), replies in self.recorded.items() if (what, who) == (question, client))
        return next(reply for replies in several for reply in replies if name in reply.extras)

    def is_finite(self) -> bool:
        """Whether all that the server keeps is finite."""
        server = self.experiment.server
        return all(map(_is_finite, leaves_in([server.state, server.remembered()])))

    def _hold(self, ask_clients: Callable[[Ask], Replies]) -> None:
        made, server = self.experiment, self.experiment.server
        asking = made.asking(ask_clients)
        with threads(made.settings.threads):
            hold(made.method, server, made.backend, asking, made.settings.rounds)
            converse(evaluation.seen(server), asking)
            for examples in made.federation.unseen.values():
                target = evaluation.inputs_of(made.bench, examples)
                newcomer: Newcomer = converse(evaluation.newcomer(server, made.bench, made.settings.newcomer, target), asking)
                evaluation.score_newcomer(made.bench, newcomer, examples)

    def _record(self, ask: Ask) -> Replies:
        for reply in self.experiment.backend(ask):
            self.recorded.setdefault((ask.what, ask.round, reply.client), []).append(reply)
            yield reply

    def _recorded_replies(self, ask: Ask) -> Replies:
        for client in ask.payloads:
            place = (ask.what, ask.round, ask.attempt, client)
            number = self.given[place] = self.given.get(place, -1) + 1
            replies = self.recorded.get((ask.what, ask.round, client), [])
            if number < len(replies):
                yield replies[number]


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def without_extra(reply: Reply, name: str) -> Reply:
    """The reply without one of its extras."""
    return with_extras(reply, {key: value for key, value in reply.extras.items() if key != name})


def with_extras(reply: Reply, extras: Mapping[str, Any]) -> Reply:
    """The reply with other extras."""
    return replace(reply, payload=replace(reply.payload, extras=extras))


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """Values that a hostile or broken client might send in the place of this one, each with what it is, in words."""
    yield from (("None", None), ("text", "text"), ("an empty list", []), ("an empty mapping", {}), ("not a number", math.nan))
    yield from (("infinite", -math.inf), ("10**400", 10**400), ("-1e30", -1e30), ("1e308", 1e308), ("-1", -1), ("True", True))
    yield from (
        ("nested deep", nested_deep()),
        ("a scalar tensor", torch.tensor(1.0)),
        ("a sparse tensor", torch.eye(2).to_sparse()),
    )
    if isinstance(value, Tensor):
        yield from _mutated_tensors(value)
    elif isinstance(value, Mapping) and value:
        first = next(iter(value))
        yield "without its first part", {key: item for key, item in value.items() if key != first}
        yield "with a part that nobody asked for", {**value, "strange": value[first]}
        yield "with a key that is no text", {**value, 7: value[first]}
        for what, bad in mutations(value[first]):
            yield f"a mapping whose first part is {what}", {**value, first: bad}
    elif isinstance(value, list | tuple) and value:
        for what, bad in mutations(value[0]):
            yield f"a list whose first item is {what}", [bad, *value[1:]]


def _mutated_tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "of another shape", torch.zeros(*value.shape, 2, dtype=value.dtype)
    yield "without its last values", value.flatten()[:-1]
    yield "in double precision", value.double() if value.dtype != torch.float64 else value.float()
    yield "of whole numbers", torch.zeros_like(value, dtype=torch.int32)
    yield "on the device meta", value.to("meta")
    if value.is_floating_point():
        for number in (math.nan, math.inf, torch.finfo(value.dtype).max, -torch.finfo(value.dtype).max):
            yield f"full of {number}", torch.full_like(value, number)


def nested_deep() -> list[Any]:
    """Lists in lists, deeper than Python recurses."""
    tree: list[Any] = []
    for _ in range(DEPTH):
        tree = [tree]
    return tree
