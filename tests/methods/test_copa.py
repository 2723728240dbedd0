"""COPA: heads of the others, the ensemble of a newcomer, and batch-instance norm."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.tiny_runs import built, client_of, prepared_batch, trained
from helpers.watching import exchanges
from polyfed.core.client import Step
from polyfed.core.method import Facts, Method
from polyfed.core.rounds import Reply, Request
from polyfed.core.sharing import head, upload_only
from polyfed.core.workbench import forward_with_features
from polyfed.errors import ModelError
from polyfed.methods.copa import BatchInstanceNorm, OtherHeads, heads_of
from polyfed.models.layers.norms import InstanceNorm
from polyfed.runs.costs import EXTRA


def test_the_first_round_of_copa_is_fedavg_to_the_bit() -> None:
    states: dict[str, dict[int, dict[str, Tensor]]] = {}
    for text in ("fedavg", 'copa(norm="keep")'):
        experiment, seen = built(text), states.setdefault(text, {})
        experiment.train([lambda server, seen=seen: seen.__setitem__(server.round, dict(server.state))])  # type: ignore[misc]
    plain, with_heads = states["fedavg"], states['copa(norm="keep")']
    assert all(torch.equal(with_heads[1][name], value) for name, value in plain[1].items())
    assert not torch.equal(with_heads[2]["stem.0.weight"], plain[2]["stem.0.weight"])


def test_without_the_term_it_is_fedavg_with_personal_heads() -> None:
    parent = trained(Method("personal_heads", sharing=(upload_only(head),), facts=Facts(client_state=True)), rounds=3)
    found = trained('copa(weight=0.0, norm="keep")', rounds=3)
    assert all(torch.equal(found.server.state[name], value) for name, value in parent.server.state.items())
    for client, kept in parent.backend.client_states.items():
        assert all(torch.equal(found.backend.client_states[client].entries[name], value) for name, value in kept.entries.items())


HEAD_NAMES = {"head.weight", "head.bias"}


def test_heads_go_up_and_all_other_heads_come_down() -> None:
    experiment = built("copa", rounds=3)
    seen = exchanges(experiment)
    everything = set(experiment.server.state)
    previous: dict[str, Reply] = {}
    for ask, replies in seen:
        for client, payload in ask.payloads.items():
            assert set(payload.entries) == everything - HEAD_NAMES and set(replies[client].entries) == everything
            others = [other for other in sorted(previous) if other != client]
            bank = payload.extras["other_heads"]
            assert len(bank) == len(others) == (0 if ask.round == 1 else 2)
            for entries, other in zip(bank, others, strict=True):
                assert set(entries) == HEAD_NAMES
                assert all(torch.equal(entries[name], previous[other].entries[name]) for name in HEAD_NAMES)
            assert not replies[client].extras
        previous = replies
    assert experiment.costs.bytes["down"]["training"][EXTRA] == 2 * 3 * 2 * (3 * 8 + 3) * 4


def test_the_term_is_the_sum_over_the_other_heads_and_leaves_the_own_head_alone() -> None:
    experiment = trained("copa(weight=0.5)", rounds=1)
    client = client_of(experiment, round_number=2)
    client.extras = experiment.server.training_payload(client.id).extras
    client.model.zero_grad()
    x, y = prepared_batch(client)
    step = Step(client, 0, x, y)
    step.logits, step.features = forward_with_features(experiment.bench, x)
    step.task_loss = experiment.bench.loss(step.logits, y)
    term = OtherHeads(0.5)(step)
    features, expected = step.features.detach().numpy().astype(float), 0.0
    for other in ("middle", "small"):
        filed = heads_of(experiment.server)[other]
        logits = features @ filed["head.weight"].numpy().T + filed["head.bias"].numpy()
        expected += 0.5 * float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(4), y.numpy()]))
    assert float(term.detach()) == pytest.approx(expected, rel=1e-5)
    term.backward()  # type: ignore[no-untyped-call]
    parameters = dict(client.model.named_parameters())
    assert parameters["head.weight"].grad is None and float(parameters["stem.0.weight"].grad.abs().max()) > 0  # type: ignore[union-attr]


def test_the_newcomer_is_the_ensemble_of_heads_on_the_averaged_extractor() -> None:
    experiment = trained("fedbn + copa")
    made = experiment.exchange(experiment.method.newcomer(experiment.server))  # type: ignore[misc]
    assert [weight for weight, _ in made.models] == pytest.approx([1 / 3] * 3)
    assert len({state["stem.0.weight"].data_ptr() for _, state in made.models}) == 1
    local = [
        experiment.backend.client_states[c].entries["stem.1.weight"] * n for c, n in {"big": 13, "middle": 8, "small": 5}.items()
    ]
    torch.testing.assert_close(made.models[0][1]["stem.1.weight"], torch.stack(local).sum(dim=0) / 26)
    for client, (_, state) in zip(("big", "middle", "small"), made.models, strict=True):
        assert torch.equal(state["head.bias"], experiment.backend.client_states[client].entries["head.bias"])


def test_only_heads_of_clients_that_trained_are_filed() -> None:
    experiment = built("copa", rounds=1, clients_per_round=0.6)
    seen = exchanges(experiment)
    assert set(heads_of(experiment.server)) == set(seen[0][1]) and len(seen[0][1]) == 2
    untrained = built("copa")
    assert len(untrained.exchange(untrained.method.newcomer(untrained.server)).models) == 1  # type: ignore[misc]


def test_a_rejected_reply_files_no_head() -> None:
    experiment = built("copa", rounds=1, min_share=0.3)
    reply = experiment.backend.accept

    def spoil(request: Request, outcome: Any) -> Any:
        made = reply(request, outcome)
        if made is not None and outcome.client == "small":
            made.payload.entries["head.bias"].fill_(float("nan"))
        return made

    experiment.backend.accept = spoil  # type: ignore[method-assign]
    experiment.train()
    assert set(heads_of(experiment.server)) == {"big", "middle"} and set(experiment.server.rejected) == {"small"}


def batch_instance(share: float) -> tuple[BatchInstanceNorm, nn.BatchNorm2d]:
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, 0.5, -2.0]))
    made = BatchInstanceNorm.like(copy.deepcopy(norm))
    with torch.no_grad():
        made.rho.fill_(share)
    return made, norm


def test_batch_instance_norm_lies_between_its_two_sides() -> None:
    x = torch.randn(5, 4, 6, 6) * 3 + 1
    whole, norm = batch_instance(1.0)
    assert torch.equal(whole(x), norm(x)) and torch.equal(whole.running_var, norm.running_var)  # type: ignore[arg-type]
    assert torch.equal(whole.eval()(x), norm.eval()(x))
    none, norm = batch_instance(0.0)
    instance = InstanceNorm(4)
    instance.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    torch.testing.assert_close(none(x), instance(x))
    mixed_norm, norm = batch_instance(0.25)
    values = x.numpy()
    sides = [
        (values - values.mean(axis=axes, keepdims=True)) / np.sqrt(values.var(axis=axes, keepdims=True) + 1e-5)
        for axes in ((0, 2, 3), (2, 3))
    ]
    scale, shift = (t.detach().numpy()[None, :, None, None] for t in (norm.weight, norm.bias))
    np.testing.assert_allclose(
        mixed_norm(x).detach().numpy(), scale * (0.25 * sides[0] + 0.75 * sides[1]) + shift, rtol=1e-4, atol=1e-4
    )


def test_the_share_is_cut_and_can_come_back() -> None:
    x = torch.randn(5, 4, 6, 6)
    layer, norm = batch_instance(1.4)
    assert torch.equal(layer.eval()(x), norm.eval()(x)) and float(layer.rho[0].detach()) == pytest.approx(1.4)
    layer.train()(x).square().sum().backward()
    assert float(layer.rho.detach().max()) == 1 and float(layer.rho.grad.abs().max()) > 0  # type: ignore[union-attr]


def test_the_share_is_learnt_and_averaged() -> None:
    experiment = trained("copa", lr=0.5)
    rho = experiment.server.state["stem.1.rho"]
    assert experiment.bench.plan.entries["stem.1.rho"].kind == "mix" and float(rho.min()) < 0.999


def test_copa_needs_batch_norm_or_says_how_to_do_without() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(ModelError, match='norm="keep"'):
        built("copa", model=plain)
    built('copa(norm="keep")', model=plain)
    with pytest.raises(ModelError, match="one position"):
        BatchInstanceNorm(2)(torch.randn(3, 2, 1, 1))
