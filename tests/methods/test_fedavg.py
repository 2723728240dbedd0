"""FedAvg against a hand-written loop; its weights and its treatment of statistics."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.seeds import chooser, generator
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_three_rounds_equal_a_hand_written_loop() -> None:
    """A residual batch-norm model, five unequal clients, momentum, weight decay, three clients a round."""
    federation = tiny_federation({"a": 13, "b": 8, "c": 21, "d": 6, "e": 10})
    settings = Settings(
        method="fedavg",
        rounds=3,
        local_epochs=2,
        batch_size=4,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-3,
        clients_per_round=3,
        seed=5,
    )
    torch.manual_seed(3)
    start = TinyNet()
    experiment = Experiment(settings, federation, model=start)
    experiment.train()

    data = {client.id: client.train for client in federation.clients}
    state = copy.deepcopy(start.state_dict())
    for number in (1, 2, 3):
        chosen = chooser(5, "sample", number).sample(sorted(data), 3)
        results, sizes = [], []
        for client in chosen:
            model = TinyNet()
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
            stream = generator(5, "client", number, client)
            for _ in range(2):
                chunks = list(torch.randperm(len(data[client]), generator=stream).split(4))
                if len(chunks[-1]) == 1:
                    chunks[-2:] = [torch.cat(chunks[-2:])]
                for chunk in chunks:
                    x = (data[client].x[chunk].float() / 255 - 0.5) / 0.5  # type: ignore[attr-defined]
                    loss = nn.functional.cross_entropy(model(x), data[client].y[chunk])  # type: ignore[attr-defined]
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            results.append(model.state_dict())
            sizes.append(len(data[client]))
        total = sum(sizes)
        state = {
            name: sum(size / total * result[name].double() for size, result in zip(sizes, results, strict=True)).float()  # type: ignore[union-attr]
            if results[0][name].is_floating_point()
            else max(result[name] for result in results)
            for name in state
        }
    for name, value in state.items():
        torch.testing.assert_close(experiment.server.state[name], value, rtol=1e-6, atol=1e-6)
        assert experiment.server.state[name].dtype == value.dtype


def test_one_client_is_plain_training() -> None:
    federation = tiny_federation({"only": 12})
    torch.manual_seed(3)
    start = TinyNet()
    experiment = Experiment(Settings(method="fedavg", rounds=1, batch_size=4, lr=0.1), federation, model=start)
    experiment.train()
    model = copy.deepcopy(start).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = federation.clients[0].train
    for chunk in torch.randperm(12, generator=generator(0, "client", 1, "only")).split(4):
        x, y = train.batch(chunk)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(experiment.server.state[name], value), name


def test_what_fedavg_does_with_statistics_is_what_it_says() -> None:
    name, count = "stem.1.running_mean", "stem.1.num_batches_tracked"
    states = {kind: trained(f'fedavg(statistics="{kind}")', rounds=1) for kind in ("average", "local", "first", "drop")}
    alone = trained("local", rounds=1).backend.client_states
    sizes = {"big": 13, "middle": 8, "small": 5}
    mean = sum(sizes[c] / 26 * alone[c].entries[name].double() for c in sizes)
    torch.testing.assert_close(states["average"].server.state[name].double(), mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    assert torch.equal(states["first"].server.state[name], alone["big"].entries[name])
    assert torch.equal(states["drop"].server.state[name], torch.zeros(8))
    assert torch.equal(states["local"].backend.client_states["small"].entries[name], alone["small"].entries[name])
    assert states["average"].server.state[count] == max(int(alone[c].entries[count]) for c in sizes)
    assert states["average"].server.state[count].dtype == torch.int64


def test_uniform_weights_are_uniform_for_every_method() -> None:
    alone = trained("local", rounds=1).backend.client_states
    uniform = trained("fedavg", rounds=1, weights="uniform").server.state
    mean = sum(alone[c].entries["head.weight"].double() for c in alone) / 3
    torch.testing.assert_close(uniform["head.weight"].double(), mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
