"""Formulas against numbers worked out another way, and identities."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from polyfed.client import Client, Kept, Workbench
from polyfed.conversation import Payload
from polyfed.entries import entries_of
from polyfed.errors import DataError, JoinError, ModelError, NotFinite, SettingError
from polyfed.experiment import Experiment
from polyfed.layers.norms import InstanceNorm
from polyfed.method import parse
from polyfed.methods.agc import clip_units
from polyfed.methods.fedprox import Proximal
from polyfed.methods.group_norm import ToGroupNorm
from polyfed.result import Result
from polyfed.seeds import chooser, generator
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation


def trained(method: str, federation: Any = None, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 3, "batch_size": 4, "lr": 0.05} | changes
    experiment = Experiment(Settings(method=method, **values), federation or tiny_federation(), model=model or TinyNet())
    experiment.train()
    return experiment


def digest_of(method: str, **changes: Any) -> str:
    return Result(trained(method, **changes), []).digest


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


def test_neutral_settings_are_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg")
    assert digest_of("fedprox(mu=0.0)") == plain
    assert digest_of('momentum(keep="none")') == plain
    assert digest_of('fedavg(statistics="average")') == plain
    assert digest_of("agc(clip=1e9)") == plain
    assert digest_of("fedprox(mu=0.01)") != plain
    assert digest_of("fedavg", seed=1) != plain


def test_delivery_and_repetition_do_not_change_bits() -> None:
    assert digest_of("fedbn") == digest_of("fedbn") == digest_of("fedbn", deliver="debug")


def test_the_gradient_of_fedprox_is_the_formula() -> None:
    bench = trained("fedprox(mu=0.3)").bench
    client = Client(tiny_federation().clients[0], bench, Kept(), 1)
    received = {name: value + 0.1 for name, value in bench.initial.items() if value.is_floating_point()}
    client.received = received
    x, y = client.data.train.batch(slice(0, 4))
    step = client.forward(0, bench.preparation.for_testing(x), y)
    bench.model.zero_grad()
    Proximal(0.3)(step).backward()  # type: ignore[no-untyped-call]
    for name, parameter in bench.parameters.items():
        expected = 0.3 * (parameter.detach() - received[name])
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected)
    value = float(Proximal(0.3)(step).detach())
    by_hand = 0.15 * sum(float(((p.detach() - received[n]) ** 2).sum()) for n, p in bench.parameters.items())
    assert value == pytest.approx(by_hand, rel=1e-5)


def test_fedprox_without_anything_received_is_an_error() -> None:
    with pytest.raises(JoinError, match="fedprox would be ignored"):
        trained("local + fedprox(mu=0.1)")


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (5, 7), (9, 1, 1, 1)])
def test_agc_is_timms_and_bounded(shape: tuple[int, ...]) -> None:
    stream = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=stream) * 0.1)
    weight.grad = torch.randn(shape, generator=stream)
    other = nn.Parameter(weight.detach().clone())
    other.grad = weight.grad.clone()
    clip_units(weight, weight.grad, clip=0.5, eps=1e-3)
    adaptive_clip_grad([other], clip_factor=0.5, eps=1e-3)
    torch.testing.assert_close(weight.grad, other.grad)
    rows = weight.grad.flatten(1).norm(dim=1)
    assert bool((rows <= 0.5 * weight.detach().flatten(1).norm(dim=1).clamp_min(1e-3) * (1 + 1e-5)).all())
    again = weight.grad.clone()
    clip_units(weight, again, clip=0.5, eps=1e-3)
    torch.testing.assert_close(again, weight.grad)


def test_agc_takes_a_vector_as_one_unit_and_leaves_small_gradients_alone() -> None:
    bias, gradient = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    clip_units(bias, gradient, clip=1.0, eps=1e-3)
    torch.testing.assert_close(gradient, torch.tensor([3.0, 4.0]))
    small = torch.tensor([0.3, 0.4])
    clip_units(bias, small, clip=1.0, eps=1e-3)
    assert torch.equal(small, torch.tensor([0.3, 0.4]))
    zero = torch.zeros(2)
    clip_units(torch.zeros(2), zero, clip=1.0, eps=1e-3)
    assert torch.equal(zero, torch.zeros(2))


def test_agc_can_spare_the_head() -> None:
    spared = trained('agc(clip=0.001, exclude="head")', rounds=1).server.state
    all_clipped = trained("agc(clip=0.001)", rounds=1).server.state
    free = trained("fedavg", rounds=1).server.state

    def moved(state: dict[str, torch.Tensor], name: str) -> float:
        torch.manual_seed(3)
        return float((state[name] - TinyNet().state_dict()[name]).norm())

    assert moved(spared, "head.weight") > 5 * moved(all_clipped, "head.weight")
    assert moved(spared, "stem.0.weight") < 0.2 * moved(free, "stem.0.weight")


def test_global_momentum_with_one_client_is_uninterrupted_training() -> None:
    federation = tiny_federation({"only": 12})
    kept = {
        keep: trained(f'momentum(keep="{keep}")', federation, momentum=0.9, lr=0.02).server.state
        for keep in ("global", "local", "none")
    }
    torch.manual_seed(3)
    model = TinyNet().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for number in (1, 2, 3):
        for chunk in torch.randperm(12, generator=generator(0, "client", number, "only")).split(4):
            x, y = federation.clients[0].train.batch(chunk)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(kept["global"][name], value) and torch.equal(kept["local"][name], value), name
    assert not torch.equal(kept["none"]["head.weight"], model.state_dict()["head.weight"])


def test_local_is_each_clients_own_uninterrupted_training() -> None:
    federation = tiny_federation()
    together = trained("local", federation, momentum=0.9)
    alone = tiny_federation({"big": 13})
    single = trained("central", alone.__class__(alone.name, alone.classes, alone.clients), momentum=0.9)
    stream_named_big = trained("fedavg + momentum(keep='local')", tiny_federation({"big": 13}), momentum=0.9)
    for name, value in stream_named_big.server.state.items():
        assert torch.equal(together.delivery.kept["big"].entries[name], value), name
    assert single.federation.clients[0].id == "pooled"


def test_central_trains_on_the_union_and_tests_every_domain() -> None:
    experiment = trained("central")
    assert [len(client.train) for client in experiment.federation.clients] == [13 + 8 + 5]
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert {row.domain for row in rows} == {"big", "middle", "small"}


def norm_by_hand(x: np.ndarray[Any, Any], groups: int, eps: float = 1e-5) -> np.ndarray[Any, Any]:
    n, c = x.shape[:2]
    parts = x.reshape(n, groups, -1)
    out = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + eps)
    return out.reshape(n, c, *x.shape[2:])


@pytest.mark.parametrize(("text", "groups"), [("group_norm(groups=2)", 2), ("layer_norm", 1), ("instance_norm", 8)])
def test_swapped_norms_compute_the_formula_and_hold_no_statistics(text: str, groups: int) -> None:
    model = parse(text).surgery[0](TinyNet())
    x = torch.rand(2, 8, 4, 4)
    assert not any("running" in name for name in model.state_dict())
    np.testing.assert_allclose(model.stem[1](x).detach().numpy(), norm_by_hand(x.numpy(), groups), rtol=1e-4, atol=1e-5)


def test_groups_by_layer_as_in_fedwon_table_5() -> None:
    model = ToGroupNorm((4, 2))(TinyNet())
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)] == [4, 2]
    with pytest.raises(Exception, match="3 numbers of groups"):
        ToGroupNorm((4, 2, 2))(TinyNet())
    with pytest.raises(Exception, match="do not divide"):
        ToGroupNorm((3, 2))(TinyNet())


def test_no_norm_puts_biases_of_zero_where_batch_norm_carried_the_shift() -> None:
    model = parse("no_norm").surgery[0](TinyNet())
    assert torch.equal(model.stem[0].bias, torch.zeros(8))
    assert isinstance(model.stem[1], nn.Identity)


@pytest.mark.parametrize("text", ["group_norm", "layer_norm", "instance_norm", "no_norm"])
def test_swaps_without_anything_to_swap_are_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="no batch norm"):
        parse(text).surgery[0](nn.Sequential(nn.Linear(3, 3)))


def test_activations_fused_into_a_batch_norm_outlive_it() -> None:
    fused = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=nn.SiLU))
    x = torch.rand(2, 3, 6, 6)
    swapped = parse("group_norm(groups=2)").surgery[0](fused)
    expected = nn.functional.silu(nn.functional.group_norm(swapped[0](x), 2))
    torch.testing.assert_close(swapped(x), expected)


def test_instance_norm_on_single_positions_says_so() -> None:
    assert {entry.layer for entry in entries_of(InstanceNorm(4)).values()} == {"instance_norm"}
    with pytest.raises(ModelError, match="one position"):
        InstanceNorm(4)(torch.zeros(2, 4, 1, 1))


def test_what_fedavg_does_with_statistics_is_what_it_says() -> None:
    name, count = "stem.1.running_mean", "stem.1.num_batches_tracked"
    states = {kind: trained(f'fedavg(statistics="{kind}")', rounds=1) for kind in ("average", "local", "first", "drop")}
    alone = trained("local", rounds=1).delivery.kept
    sizes = {"big": 13, "middle": 8, "small": 5}
    mean = sum(sizes[c] / 26 * alone[c].entries[name].double() for c in sizes)
    torch.testing.assert_close(states["average"].server.state[name].double(), mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    assert torch.equal(states["first"].server.state[name], alone["big"].entries[name])
    assert torch.equal(states["drop"].server.state[name], torch.zeros(8))
    assert torch.equal(states["local"].delivery.kept["small"].entries[name], alone["small"].entries[name])
    assert states["average"].server.state[count] == max(int(alone[c].entries[count]) for c in sizes)
    assert states["average"].server.state[count].dtype == torch.int64


def test_uniform_weights_are_uniform_for_every_method() -> None:
    alone = trained("local", rounds=1).delivery.kept
    uniform = trained("fedavg", rounds=1, weights="uniform").server.state
    mean = sum(alone[c].entries["head.weight"].double() for c in alone) / 3
    torch.testing.assert_close(uniform["head.weight"].double(), mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


def test_local_work_in_steps() -> None:
    experiment = trained("fedavg", rounds=1, local_steps=7)
    assert experiment.server.state["stem.1.num_batches_tracked"] == 7


@pytest.mark.parametrize(("policy", "batches"), [("merge", 3), ("drop", 3), ("keep", 4)])
def test_a_last_batch_of_one_follows_the_stated_choice(policy: str, batches: int) -> None:
    experiment = trained("fedavg", tiny_federation({"one": 13}), rounds=1, last_batch=policy)
    assert experiment.server.state["stem.1.num_batches_tracked"] == batches


def test_a_last_batch_of_one_can_be_refused_and_needs_no_choice_without_batch_norm() -> None:
    with pytest.raises(DataError, match="batch of one"):
        trained("fedavg", tiny_federation({"one": 13}), last_batch="error")
    trained("fedavg + group_norm(groups=2)", tiny_federation({"one": 13}), last_batch="error")
    with pytest.raises(SettingError, match="batches of one sample"):
        trained("fedavg", batch_size=1)


def test_schedule_and_budget() -> None:
    settings = Settings(lr=1.0, rounds=4, schedule="cosine")
    assert [settings.lr_at(r) for r in (1, 3)] == pytest.approx([1.0, 0.5])
    assert [Settings(lr=1.0, rounds=4, schedule="steps(at=(0.5,), factor=0.1)").lr_at(r) for r in (2, 3)] == pytest.approx(
        [1.0, 0.1]
    )
    # FixBN: 128 epochs of 26 samples in steps of batch 4 at three clients: R = 128 * 26 / (2 * 4 * 3)
    experiment = Experiment(Settings(total_epochs=128, local_steps=2, batch_size=4), tiny_federation(), model=TinyNet())
    assert experiment.settings.rounds == round(128 * 26 / 24)


def test_a_loss_that_is_not_finite_names_client_and_round() -> None:
    with pytest.raises(NotFinite, match=r"Client big.* round 1"):
        trained("fedavg", lr=1e30, rounds=2)
    with pytest.raises(NotFinite, match=r"step \d"):
        trained("fedavg", lr=1e30, rounds=2, deliver="debug")


def test_simulated_dropouts_are_repeatable_and_leave_state_alone() -> None:
    one, two = (trained("fedbn", drop=0.4, rounds=6, min_share=0.1) for _ in range(2))
    assert Result(one, []).digest == Result(two, []).digest
    assert Result(one, []).digest != digest_of("fedbn", rounds=6)


def test_memory_grows_only_by_local_entries() -> None:
    experiment = trained("silobn", tiny_federation({f"c{i}": 5 for i in range(12)}))
    local = sum(v.numel() * v.element_size() for n, v in TinyNet().state_dict().items() if "running" in n or "num_batches" in n)
    held = sum(v.numel() * v.element_size() for kept in experiment.delivery.kept.values() for v in kept.entries.values())
    assert held == 12 * local


def test_payloads_given_to_clients_are_the_servers_tensors_not_copies() -> None:
    experiment = trained("fedavg", rounds=1)
    ask = experiment.server.ask("train", experiment.server.sample())
    payloads: list[Payload] = list(ask.payloads.values())
    assert all(p.entries["head.weight"] is experiment.server.state["head.weight"] for p in payloads)


def test_the_workbench_never_trains_on_what_the_last_client_left() -> None:
    experiment = trained("fedbn", rounds=1)
    bench: Workbench = experiment.bench
    client = Client(tiny_federation().clients[2], bench, experiment.delivery.kept["small"], 2)
    client.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], experiment.delivery.kept["small"].entries["stem.1.running_mean"])
    newcomer = Client(tiny_federation().clients[2], bench, Kept(), 2)
    newcomer.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], torch.zeros(8))
