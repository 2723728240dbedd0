"""FedStein: its three variants, what travels, and identities."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from helpers import tiny_runs
from helpers.formulas import factor_by_hand
from helpers.watching import messages
from polyfed.core.entries import entries_of
from polyfed.core.method import Facts, Method, parse
from polyfed.core.rounds import NEWCOMER
from polyfed.core.sharing import bn_affine, keep_local
from polyfed.errors import JoinError, ModelError, OptionError
from polyfed.models.layers.norms import JSBatchNorm
from polyfed.runs.result import Result
from polyfed.testing import SIZES, TinyNet

trained = functools.partial(tiny_runs.trained, rounds=3, momentum=0.9)


def test_every_batch_norm_of_a_resnet_is_taken_over_with_its_values() -> None:
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)
    model(torch.rand(2, 3, 32, 32))
    model.bn1.weight.requires_grad_(False)
    model.bn1.eps = 1e-3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: (entry.kind, entry.layer) for name, entry in entries_of(model).items()}
    operated = parse("fedstein").surgery[0](model)
    assert all(torch.equal(value, before[name]) for name, value in operated.state_dict().items())
    assert list(operated.state_dict()) == list(before)
    assert {name: (entry.kind, entry.layer) for name, entry in entries_of(operated).items()} == kinds
    assert sum(isinstance(m, JSBatchNorm) for m in operated.modules()) == 12
    assert operated.bn1.eps == 1e-3 and not operated.bn1.weight.requires_grad
    with pytest.raises(ModelError, match="no batch norm"):
        parse("fedstein").surgery[0](nn.Linear(2, 2))


def test_without_shrinkage_it_is_fedavg_with_the_affine_local() -> None:
    reference = Method("affine_local", sharing=(keep_local(bn_affine),), facts=Facts(batch_norm=True, client_state=True))
    expected = Result(trained(reference), []).digest
    for variant in ("jsnorm", "server", "eval_only"):
        assert Result(trained(f'fedstein(variant="{variant}", shrink=False)'), []).digest == expected
        if variant != "eval_only":
            assert Result(trained(f'fedstein(variant="{variant}")'), []).digest != expected


def test_eval_only_trains_as_without_shrinkage_and_evaluates_with_it() -> None:
    one, plain = trained('fedstein(variant="eval_only")'), trained("fedstein(shrink=False)")
    assert Result(one, []).digest == Result(plain, []).digest
    x = torch.rand(4, 3, 8, 8)
    for experiment in (one, plain):
        experiment.bench.load(experiment.server.state)
        experiment.bench.model.eval()
    assert not torch.allclose(one.bench.model(x), plain.bench.model(x), rtol=1e-3)


def test_the_server_variant_shrinks_the_average_and_nothing_else() -> None:
    model = TinyNet()
    with torch.no_grad():
        for name in ("stem.0.weight", "branch.0.weight"):
            model.get_parameter(name).mul_(torch.linspace(0.2, 6.0, 8).view(8, 1, 1, 1))
    literal, plain = (
        trained(text, rounds=1, model=model).server.state for text in ('fedstein(variant="server")', "fedstein(shrink=False)")
    )
    for name, value in plain.items():
        expected = value.numpy()
        if name.endswith(("running_mean", "running_var")):
            expected = expected * factor_by_hand(expected.astype(np.float64))
            assert not np.allclose(expected, value.numpy(), rtol=1e-3)
        np.testing.assert_allclose(literal[name].numpy(), expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_server_variant_without_statistics_to_shrink_is_an_error() -> None:
    with pytest.raises(JoinError, match="has no effect"):
        trained('fedstein(variant="server") + silobn')
    trained("fedstein + silobn", rounds=1)


def test_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    for text in ("fedstein", 'fedstein(variant="server")'):
        seen.clear()
        experiment = trained(text, rounds=2)
        affine = {f"{layer}.{key}" for layer in ("stem.1", "branch.1") for key in ("weight", "bias")}
        assert len(seen) == 6
        for ask, reply in seen:
            assert set(reply.entries) == set(ask.payloads[reply.client].entries) == set(TinyNet().state_dict()) - affine
        assert all(affine <= set(kept.entries) for kept in experiment.backend.client_states.values())
        experiment.evaluate()
        asked = {name for ask, reply in seen if ask.purpose == NEWCOMER for name in reply.entries}
        assert asked == affine


def test_a_newcomer_gets_the_affine_averaged_by_weight() -> None:
    experiment = trained("fedstein")
    state = experiment.newcomer_state()
    kept, total = experiment.backend.client_states, sum(SIZES.values())
    for name in ("stem.1.weight", "branch.1.bias"):
        mean = sum(SIZES[client] / total * kept[client].entries[name].double() for client in SIZES)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    assert torch.equal(state["stem.1.running_mean"], experiment.server.state["stem.1.running_mean"])


def test_options_are_checked_and_clashes_named() -> None:
    with pytest.raises(OptionError, match="Did you mean jsnorm"):
        parse('fedstein(variant="jsnom")')
    with pytest.raises(JoinError, match="norm"):
        parse("fedstein + group_norm")
    assert str(parse('fedstein(variant="jsnorm")')) == "fedstein"


def test_re_estimated_newcomers_hold_raw_statistics() -> None:
    """The evaluation resets and re-fills buffers layer by layer; the James-Stein layer must follow that protocol."""
    experiment = trained("fedstein", rounds=1)
    rows = experiment.evaluate(newcomer="re-estimated")
    assert any(row.view == "unseen" and math.isfinite(row.numbers["accuracy"]) for row in rows)
