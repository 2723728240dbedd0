"""The guiding term: its gradient by hand, a hand-written loop, and what it needs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import tiny_runs
from polyfed.core.client import Client
from polyfed.core.method import Method, parse
from polyfed.core.seeds import generator
from polyfed.core.sharing import head, keep_local
from polyfed.core.workbench import ClientState
from polyfed.errors import JoinError, ModelError
from polyfed.methods.guiding import Guide
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_the_gradient_of_guiding_is_by_hand_and_never_reaches_the_head() -> None:
    bench = trained("guiding(weight=0.7)", rounds=1).bench
    client = Client(tiny_federation().clients[0], bench, ClientState(), 1)
    stream = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, 8, generator=stream), torch.randn(3, generator=stream)
    client.received = {"head.weight": weight, "head.bias": bias}
    x, y = client.data.train.batch(slice(0, 5))
    x = bench.preparation.for_testing(x)
    twin = copy.deepcopy(bench.model).train()
    bench.model.train()
    step = client.forward(0, x, y)
    bench.model.zero_grad()
    value = Guide(0.7)(step)
    value.backward()  # type: ignore[no-untyped-call]

    stem = twin.stem(x)  # type: ignore[operator]
    features = torch.relu(stem + twin.branch(stem)).mean(dim=(2, 3))  # type: ignore[operator]
    logits = features @ weight.T + bias
    by_hand = 0.7 * (logits.logsumexp(1) - logits[torch.arange(5), y]).mean()
    names = [name for name, _ in twin.named_parameters() if not name.startswith("head.")]
    gradients = torch.autograd.grad(by_hand, [twin.get_parameter(name) for name in names])
    torch.testing.assert_close(value, by_hand)
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(bench.parameters[name].grad, gradient, rtol=1e-4, atol=1e-6)
    assert bench.parameters["head.weight"].grad is None and bench.parameters["head.bias"].grad is None


def test_gfedavg_with_one_client_is_a_hand_written_loop() -> None:
    federation = tiny_federation({"only": 12})
    experiment = trained("fedavg + guiding(weight=0.5)", federation, rounds=2)
    torch.manual_seed(3)
    model = TinyNet().train()
    for number in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        frozen = copy.deepcopy(model.head).requires_grad_(False)
        for chunk in torch.randperm(12, generator=generator(0, "client", number, "only")).split(4):
            x, y = federation.clients[0].train.batch(chunk)
            stem = model.stem(federation.preparation.for_testing(x))
            features = torch.relu(stem + model.branch(stem)).mean(dim=(2, 3))
            optimizer.zero_grad()
            loss = F.cross_entropy(model.head(features), y) + 0.5 * F.cross_entropy(frozen(features), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(experiment.server.state[name], value, rtol=1e-5, atol=1e-6)


def test_guiding_uses_the_loss_of_the_run_and_zero_is_neutral() -> None:
    bench = trained("guiding", rounds=1).bench
    bench.loss = lambda logits, y: (logits * 2).sum()
    client = Client(tiny_federation().clients[0], bench, ClientState(), 1)
    client.received = {"head.weight": torch.zeros(3, 8), "head.bias": torch.tensor([1.0, 2.0, 3.0])}
    x, y = client.data.train.batch(slice(0, 4))
    value = Guide(0.25)(client.forward(0, bench.preparation.for_testing(x), y))
    assert float(value.detach()) == pytest.approx(0.25 * 2 * 6 * 4)
    plain = Result(trained("fedavg"), []).digest
    assert Result(trained("guiding(weight=0.0)"), []).digest == plain
    assert Result(trained("guiding"), []).digest != plain


def test_a_head_with_buffers_is_not_written_to_by_the_guide() -> None:
    class DeepHead(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))  # type: ignore[assignment]

    experiment = Experiment(
        Settings(rounds=1, local_steps=2, batch_size=4, head="head", drop=0.0), tiny_federation(), "guiding", DeepHead()
    )
    before = {name: value.clone() for name, value in experiment.server.state.items()}
    sent = experiment.server.state
    experiment.train()
    assert all(torch.equal(sent[name], before[name]) for name in before)
    assert int(experiment.server.state["head.1.num_batches_tracked"]) == 2


def test_guiding_without_a_received_head_is_an_error() -> None:
    class Doubtful(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ModelError, match=r"guiding.*--head"):
        trained("guiding", model=Doubtful())
    with pytest.raises(ModelError, match=r"--head"):
        trained("gperxan", model=Doubtful())
    trained("guiding", model=Doubtful(), head="head", rounds=1)
    own_head = Method("own_head", sharing=(keep_local(head),))
    for value in (parse("local + guiding"), own_head + parse("guiding").parts[-1]):
        with pytest.raises(JoinError, match="no received head"):
            trained(value)
    with pytest.raises(JoinError, match="already"):
        trained("gperxan + guiding")
