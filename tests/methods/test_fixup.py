"""Fixup: its start, its forward pass written out, and its slow scalars."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.networks import operated
from helpers.tiny_runs import built, trained
from helpers.watching import watched
from polyfed.errors import ModelError, OptionError
from polyfed.models import models


def fixup_resnet20(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The forward pass of Fixup's ResNet-20, written out."""
    x = F.relu(F.conv2d(x, state["body.conv.weight"], padding=1) + state["body.bn.shift"])
    for stage in (1, 2, 3):
        for block in (1, 2, 3):
            own = {n.removeprefix(p): v for n, v in state.items() if n.startswith(p := f"body.stage{stage}_block{block}.")}
            stride = 2 if stage > 1 and block == 1 else 1
            out = F.conv2d(x + own["conv1.input_shift"], own["conv1.weight"], stride=stride, padding=1)
            out = F.relu(out + own["bn1.shift"])
            out = F.conv2d(out + own["conv2.input_shift"], own["conv2.weight"], padding=1)
            out = out * own["bn2.multiplier"] + own["bn2.shift"]
            if stride == 2:
                x = F.avg_pool2d(x, 1, 2)
                zeros = torch.zeros_like(x)[:, : x.shape[1] // 2]
                x = torch.cat([zeros, x, zeros], dim=1)
            x = F.relu(out + x)
    return F.linear(x.mean((2, 3)) + state["head.input_shift"], state["head.weight"], state["head.bias"])


def test_fixup_resnet20_starts_and_computes_as_defined() -> None:
    torch.manual_seed(0)
    plain = models.build("resnet20", classes=4, input_shape=(3, 16, 16))
    stem = plain.body.conv.weight.detach().clone()  # type: ignore[union-attr, operator]
    model = operated(plain, "fixup")
    state = model.state_dict()
    assert torch.equal(state["body.conv.weight"], stem) and not any("running" in name for name in state)
    scalars = {n: float(v) for n, v in state.items() if v.numel() == 1}
    assert len(scalars) == 9 * 5 + 2
    assert all(value == (1.0 if name.endswith("multiplier") else 0.0) for name, value in scalars.items())
    for name, value in state.items():
        if "conv2.weight" in name or name in ("head.weight", "head.bias"):
            assert not value.any()
        if "conv1.weight" in name:
            expected = math.sqrt(2 / (value.shape[0] * 9)) * 9**-0.5
            assert float(value.std()) == pytest.approx(expected, rel=0.06)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), fixup_resnet20(dict(model.named_parameters()), x), rtol=1e-4, atol=1e-5)


def test_fixup_on_torchvision_networks() -> None:
    torch.manual_seed(0)
    model = operated(torchvision.models.resnet50(num_classes=3), "fixup")
    blocks = [m for m in model.modules() if isinstance(m, torchvision.models.resnet.Bottleneck)]
    assert len(blocks) == 16 and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert all(not b.conv3.weight.any() and torch.equal(b.bn3.multiplier, torch.ones(1)) for b in blocks)  # type: ignore[arg-type]
    expected = math.sqrt(2 / (512 * 9)) * 16**-0.25
    assert float(blocks[-1].conv2.weight.detach().std()) == pytest.approx(expected, rel=0.02)
    assert isinstance(blocks[0].downsample[1], nn.Identity)  # type: ignore[index]
    basic = operated(torchvision.models.resnet18(num_classes=3), "fixup")
    assert sum("shift" in n or "multiplier" in n for n, _ in basic.named_parameters()) == 8 * 5 + 3 + 2
    with torch.device("meta"):  # no values, since only the graph is looked at
        others = torchvision.models.vgg11_bn(), torchvision.models.squeezenet1_1()
    for other in others:
        with pytest.raises(ModelError, match="no residual branch"):
            operated(other, "fixup")


def test_fixup_without_slow_scalars_is_fedavg_on_the_same_network() -> None:
    experiment = built("fixup(scalar_lr=1.0)", momentum=0.9)
    same = copy.deepcopy(experiment.bench.model)
    names = set(same.state_dict())
    assert watched(experiment)[1, "train"] == (names, names)
    other = trained("fedavg", model=same, momentum=0.9)
    assert all(torch.equal(other.server.state[name], value) for name, value in experiment.server.state.items())


def test_scalars_learn_ten_times_slower() -> None:
    ends = {}
    for share in (0.1, 1.0):
        experiment = built(f"fixup(scalar_lr={share})", rounds=1, local_steps=1)
        # The head starts at zero, and so would the first gradients of what lies before it.
        experiment.server.state["head.weight"] = torch.linspace(-1, 1, 24).view(3, 8)
        experiment.train()
        ends[share] = experiment.server.state
    slow, fast = ends[0.1], ends[1.0]
    assert bool(fast["head.input_shift"].abs() > 1e-4)
    for name in ("head.input_shift", "stem.1.shift", "branch.1.shift"):
        torch.testing.assert_close(slow[name], 0.1 * fast[name], rtol=1e-3, atol=1e-7)
    assert torch.equal(slow["head.weight"], fast["head.weight"])
    with pytest.raises(OptionError, match="Use --optimizer sgd"):
        built("fixup", optimizer="adam")
