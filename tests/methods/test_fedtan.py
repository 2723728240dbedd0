"""FedTAN: the first step is that of centralised batch norm on the union of all batches; messages, what travels, identities."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.method import parse
from polyfed.errors import JoinError, ModelError, PolyfedError, SettingError
from polyfed.models import models
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

FULL: dict[str, Any] = {"rounds": 1, "batch_size": 32, "local_steps": 1, "lr": 1.0}


class Exact(nn.Module):
    """A model in another precision, fed with ordinary inputs."""

    def __init__(self, inside: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside, self.dtype = inside.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x.to(self.dtype))
        return out


class Parallel(nn.Module):
    """Batch norm of vectors, and of maps in two branches, one of them with half the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.BatchNorm1d(6)
        self.wide = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
        self.narrow = nn.Sequential(nn.Conv2d(3, 6, 1, stride=2), nn.BatchNorm2d(6, affine=False), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.wide(x) + self.narrow(x)
        out: Tensor = self.head(self.last(both.mean((2, 3))))
        return out


def built(model: nn.Module, method: str = "fedtan", sizes: dict[str, int] | None = None, **changes: Any) -> Experiment:
    return Experiment(Settings(method=method, **(FULL | changes)), tiny_federation(sizes), model=model)


def central_step(start: nn.Module, federation: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and state of one step of ordinary batch norm on all samples together."""
    model = copy.deepcopy(start).train()
    x, y = federation.pooled().clients[0].train.batch(slice(None))
    nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, model.state_dict()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [TinyNet, Parallel])
def test_the_aggregated_gradient_is_that_of_the_union(kind: Any, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(3)
    start = Exact(kind(), dtype)
    experiment = built(start)
    experiment.train()
    gradients, state = central_step(start, experiment.federation)
    assert len({len(client.train) for client in experiment.federation.clients}) == 3
    before, after = start.state_dict(), experiment.server.state
    found = torch.cat([(before[name] - after[name]).flatten() for name in gradients])
    expected = torch.cat([value.flatten() for value in gradients.values()])
    assert float((found - expected).norm() / expected.norm()) < bound
    if dtype == torch.float64:
        assert float((found - expected).abs().max()) < bound
    for name, value in state.items():
        if "running" in name or "num_batches" in name:
            torch.testing.assert_close(after[name], value, rtol=bound, atol=bound)


def test_fedavg_does_not_do_this() -> None:
    torch.manual_seed(3)
    start = Exact(TinyNet(), torch.float64)
    experiment = built(start, "fedavg")
    experiment.train()
    gradients, _ = central_step(start, experiment.federation)
    name = "inside.stem.0.weight"
    assert (
        float((start.state_dict()[name] - experiment.server.state[name] - gradients[name]).norm() / gradients[name].norm()) > 0.05
    )


def test_running_variance_is_the_unions() -> None:
    torch.manual_seed(3)
    start = Exact(TinyNet(), torch.float64)
    experiment = built(start)
    experiment.train()
    x, _ = experiment.federation.pooled().clients[0].train.batch(slice(None))
    maps = start.inside.stem[0](experiment.federation.preparation.for_testing(x).double())  # type: ignore[index, operator]
    values = maps.transpose(0, 1).flatten(1)
    assert values.shape[1] == 26 * 64
    expected = 0.9 + 0.1 * values.var(dim=1, correction=1)
    torch.testing.assert_close(experiment.server.state["inside.stem.1.running_var"], expected, rtol=1e-10, atol=0.0)


def test_uniform_weights_weigh_statistics_uniformly() -> None:
    torch.manual_seed(3)
    start = TinyNet()
    experiment = built(start, weights="uniform")
    experiment.train()
    prepared = [experiment.federation.preparation.for_testing(c.train.batch(slice(None))[0]) for c in experiment.federation.clients]
    means = torch.stack([start.stem[0](x).mean((0, 2, 3)) for x in prepared])
    torch.testing.assert_close(experiment.server.state["stem.1.running_mean"], 0.1 * means.mean(0), rtol=1e-4, atol=1e-6)


def test_one_client_is_fedavg() -> None:
    torch.manual_seed(3)
    model = TinyNet()
    ends = []
    for method in ("fedtan", "fedavg"):
        experiment = built(model, method, {"only": 13}, rounds=2, batch_size=4, local_steps=None, lr=0.05, momentum=0.9)
        experiment.train()
        ends.append(experiment.server.state)
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-5, atol=1e-6)


def test_one_batch_of_dropout_is_one_and_the_same() -> None:
    """With dropout the exchanged passes and the trained one must see the same masks: one client is FedAvg only then."""
    torch.manual_seed(3)
    model = TinyNet()
    model.stem.append(nn.Dropout(0.5))
    ends = []
    for method in ("fedtan", "fedavg"):
        experiment = built(model, method, {"only": 13}, lr=0.05)
        experiment.train()
        ends.append(experiment.server.state)
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-5, atol=1e-6)


def test_messages_and_what_travels() -> None:
    torch.manual_seed(3)
    experiment = built(TinyNet(), rounds=2)
    experiment.train()
    assert experiment.costs.messages["training"] == 2 * 3 * (3 * 2 + 1)
    model = sum(value.numel() * value.element_size() for value in TinyNet().state_dict().values())
    up, down = (experiment.costs.bytes[way]["training"] for way in ("up", "down"))
    for way in (up, down):
        assert sum(size for kind, size in way.items() if kind != "extra") == 2 * 3 * model
    # Per client, round and layer: mean, variance and two gradients of 8 channels, a number, and the name of the layer three times.
    names = 3 * (len("stem.1") + len("branch.1"))
    assert up["extra"] == down["extra"] == 2 * 3 * (2 * (4 * 8 * 4 + 8) + names)
    assert all(kept.memory == {"fedtan": 2} and not kept.entries for kept in experiment.backend.client_states.values())


def test_messages_on_resnet20() -> None:
    model = models.build("resnet20", classes=3, input_shape=(3, 8, 8))
    experiment = built(model, sizes={"a": 3, "b": 2}, lr=0.01)
    experiment.train()
    assert experiment.costs.messages["training"] == 2 * 58


def test_what_it_cannot_do_says_so() -> None:
    with pytest.raises(JoinError, match="same model at all clients"):
        built(TinyNet(), "fedtan + fedbn")
    with pytest.raises(JoinError, match="has no effect with fedtan"):
        parse("fedtan + fixbn")
    with pytest.raises(ModelError, match="no batch norm"):
        built(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    with pytest.raises(SettingError, match="every client"):
        built(TinyNet(), clients_per_round=2).train()
    with pytest.raises(SettingError, match="compiled steps do not support"):
        built(TinyNet(), compile="on")
    norm = nn.BatchNorm2d(3)
    twice = nn.Sequential(norm, nn.ReLU(), norm, nn.Flatten(), nn.Linear(192, 3))
    with pytest.raises(PolyfedError, match="used twice"):
        built(twice).train()
    idle = TinyNet()
    idle.spare = nn.BatchNorm2d(4)
    with pytest.raises(PolyfedError, match="is not used in its forward pass"):
        built(idle).train()
