"""A client's training written out: plain SGD, one step after the other."""

from __future__ import annotations

import copy

import torch
from torch import nn

from helpers.tiny_runs import State
from polyfed.core.seeds import generator
from polyfed.runs.experiment import Experiment
from polyfed.testing import TinyNet


def local_run(state: State, experiment: Experiment, client: str, number: int, correction: State) -> tuple[State, State, int]:
    """Plain SGD by hand: the state after it, the mean raw gradient, and the number of steps."""
    model, train = TinyNet(), {c.id: c.train for c in experiment.federation.clients}[client]
    model.load_state_dict(state)
    chunks = list(torch.randperm(len(train), generator=generator(0, "client", number, client)).split(4))
    if len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for chunk in chunks:
        x, y = train.batch(chunk)
        loss = nn.functional.cross_entropy(model(experiment.bench.preparation.for_testing(x)), y)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                total[name] += p.grad
                p -= 0.05 * (p.grad + correction.get(name, 0.0))
    return copy.deepcopy(model.state_dict()), {name: value / len(chunks) for name, value in total.items()}, len(chunks)
