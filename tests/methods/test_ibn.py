"""IBN: its two halves, its places, what travels, and an identity."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.networks import used_norm
from helpers.tiny_entries import AFFINE, PLAIN, STATISTICS, under
from helpers.tiny_runs import trained
from polyfed.core.data_types import ArrayExamples, Federation
from polyfed.errors import ModelError
from polyfed.methods.ibn import IBN, ToIBN
from polyfed.testing import TinyNet, tiny_federation


@pytest.mark.parametrize("training", [True, False])
def test_ibn_halves_are_torchs_own_norms(training: bool) -> None:
    norm, x = used_norm(7).train(training), torch.randn(5, 7, 4, 4)
    layer = IBN(norm)
    instance = F.instance_norm(x[:, :3], weight=norm.weight[:3], bias=norm.bias[:3])
    whole = norm(x)
    torch.testing.assert_close(layer(x), torch.cat((instance, whole[:, 3:]), 1), rtol=1e-5, atol=1e-5)
    assert norm.running_mean is not None
    torch.testing.assert_close(layer.batch_half.running_mean, norm.running_mean[3:])


def split_at(model: nn.Module, where: str | tuple[str, ...] = "auto") -> list[str]:
    made = ToIBN(where)(model)
    return [path for path, module in made.named_modules() if isinstance(module, IBN)]


def test_ibn_places() -> None:
    blocks = [f"layer{stage}.{block}.bn1" for stage in (1, 2, 3) for block in (0, 1)]
    assert split_at(torchvision.models.resnet18(num_classes=3)) == blocks
    counts = {1: 3, 2: 4, 3: 6}
    deep = [f"layer{stage}.{block}.bn1" for stage, count in counts.items() for block in range(count)]
    assert split_at(torchvision.models.resnet50(num_classes=3)) == deep
    assert split_at(TinyNet()) == ["stem.1"]
    assert split_at(TinyNet(), "branch.*") == ["branch.1"]
    assert split_at(TinyNet(), "all") == ["stem.1", "branch.1"]
    with pytest.raises(ModelError, match="no batch norm of feature maps"):
        ToIBN("auto")(nn.Sequential(nn.Linear(2, 2)))


def test_ibn_travels_whole_and_its_batch_half_is_batch_norm_to_fedbn() -> None:
    shared = trained("ibn", rounds=1).bench.plan.at(1)
    assert all(travel.words == "shared" for travel in shared.travels.values())
    personal = trained("fedbn + ibn", rounds=1).bench.plan.at(1).travels
    assert personal["stem.1.batch_half.weight"].words == "local"
    assert personal["stem.1.instance_half.weight"].words == "shared"


def alike() -> Federation:
    """Every client has one image, many times, under several labels."""
    federation = tiny_federation()

    def repeated(x: Tensor) -> Tensor:
        return x[:1].expand_as(x).clone()

    clients = [
        dataclasses.replace(client, train=ArrayExamples(repeated(client.train.batch(slice(None))[0]), client.train.labels))
        for client in federation.clients
    ]
    return dataclasses.replace(federation, clients=tuple(clients))


def test_ibn_is_its_parent_where_every_image_of_a_batch_is_the_same() -> None:
    """Then the statistics of an image are those of its batch, and half the channels lose nothing by being normalised alone."""
    ours, plain = trained("ibn", alike()).server.state, trained("fedavg", alike()).server.state
    halves = {name: torch.cat([ours[f"stem.1.{half}_half.{name}"] for half in ("instance", "batch")]) for name in AFFINE}
    for name in AFFINE:
        torch.testing.assert_close(halves[name], plain[f"stem.1.{name}"], rtol=0, atol=1e-5)
    for name in STATISTICS:
        whole = plain[f"stem.1.{name}"]
        torch.testing.assert_close(ours[f"stem.1.batch_half.{name}"], whole[4:] if whole.dim() else whole, rtol=1e-5, atol=1e-5)
    for name in PLAIN - under("stem.1", *AFFINE, *STATISTICS):
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-5)
    apart = trained("ibn").server.state["head.weight"] - trained("fedavg").server.state["head.weight"]
    assert float(apart.abs().max()) > 1e-3
