"""A seeded fuzz: replies of one client, changed at random, for every registered method on the tiny federation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.core.method import as_method
from polyfed.core.rounds import Reply, Request
from polyfed.runs.experiment import Experiment
from polyfed.runs.replay import Change, Replay, mutations, with_extras
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

OPTIONS = {"hfedf": 'hfedf(embedding="autoencoder", embedding_epochs=1)', "fixbn": 'fixbn(freeze_at=1.0, stage_one="decoupled")'}
"""Methods whose defaults leave out a question."""


def replay_of(name: str) -> Replay:
    torch.manual_seed(3)
    method = as_method(OPTIONS.get(name, name))
    replay = Replay(Experiment(Settings(rounds=2, batch_size=4, momentum=0.9), tiny_federation(), method, TinyNet()))
    replay.train(replay.record)
    replay.evaluate(replay.record)
    return replay


def mutated(reply: Reply, stream: random.Random) -> Reply:
    """One thing about a reply is changed: an extra, an entry, the samples, or who it is from."""
    kind = stream.choice(("extra", "extra", "entry", "entry", "missing", "strange", "samples", "payload"))
    if kind == "samples":
        return replace(reply, samples=stream.choice([0, -1, 10**400, "5", None, True, 2.5]))
    if kind == "payload":
        return replace(
            reply, payload=stream.choice([None, replace(reply.payload, extras=[1]), replace(reply.payload, entries="text")])
        )
    extras, entries = dict(reply.extras), dict(reply.entries)
    chosen: dict[Any, Any] = stream.choice([part for part in (extras, entries) if part] or [extras])
    if kind == "strange" or not chosen:
        chosen[stream.choice(["strange", 7, None])] = stream.choice([torch.ones(2), "text", 10**400, [[[]]]])
    elif kind == "missing":
        del chosen[stream.choice(list(chosen))]
    else:
        part = extras if kind == "extra" and extras else entries or extras
        name = stream.choice(list(part))
        part[name] = changed(part[name], stream)
    return replace(with_extras(reply, extras), payload=replace(reply.payload, extras=extras, entries=entries))


def changed(value: Any, stream: random.Random) -> Any:
    """Something else in the place of a value, often only a part of it."""
    if isinstance(value, Mapping) and value and stream.random() < 0.7:
        name = stream.choice(list(value))
        return {**value, name: changed(value[name], stream)}
    if isinstance(value, torch.Tensor) and value.numel() and stream.random() < 0.5:
        bent = value.clone()
        bent.view(-1)[stream.randrange(bent.numel())] = stream.choice(
            [-1, 2**62, 1e14]
            if bent.dtype == torch.int64
            else [float("nan"), float("-inf"), -1e14, 200.0]
            if bent.is_floating_point()
            else [0, 1, 255]
        )
        return bent
    if isinstance(value, int | float) and stream.random() < 0.3:
        return value * stream.choice([-1, 0, 2, 1e14, 1e300])
    return stream.choice([bad for _, bad in mutations(value)])


def fuzzed(names: list[str], trials: int, seed: int) -> Iterator[tuple[str, int, Replay]]:
    """Give each method its share of runs, each with one reply changed, and yield after each; whatever raises is a finding."""
    for index, name in enumerate(names):
        replay = replay_of(name)
        places = sorted({(what, number) for what, number, _ in replay.recorded})
        alone = len(replay.experiment.server.clients) == 1
        for trial in range(index, trials, len(names)):
            stream = random.Random(f"{seed} {name} {trial}")
            what, number = stream.choice(places)
            bad = stream.choice(sorted(client for w, n, client in replay.recorded if (w, n) == (what, number)))
            replay.run(one_mutated((what, number, bad), stream, alone))
            yield name, trial, replay


def one_mutated(where: tuple[str, int, str], stream: random.Random, alone: bool) -> Change:
    """Changes the replies of one client to one question of one round. Where there is no other client, its second try is good."""

    def change(request: Request, reply: Reply) -> Reply:
        hit = (request.what, request.round, reply.client) == where and not (alone and request.attempt)
        return mutated(reply, stream) if hit else reply

    return change
