"""CCST, ELCFS and COPA: their formulas worked out another way, what travels, identities, and parts they join with."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.checkpoint import digest
from polyfed.client import Client, Kept, Step, forward_with_features
from polyfed.conversation import Ask, Reply
from polyfed.data.federation import ArrayExamples, Federation
from polyfed.errors import ClientFailure, DataError, JoinError, ModelError, OptionError
from polyfed.experiment import Experiment
from polyfed.layers.norms import InstanceNorm
from polyfed.ledger import EXTRA
from polyfed.method import SLOTS, Facts, Method, parse
from polyfed.methods.ccst import restyled
from polyfed.methods.copa import BatchInstanceNorm, OtherHeads, heads_of
from polyfed.methods.elcfs import OuterLoss, mixed
from polyfed.seeds import generator
from polyfed.settings import Settings
from polyfed.sharing import head, upload_only
from polyfed.testing import TinyNet, tiny_federation


def built(method: str | Method, federation: Federation | None = None, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    return Experiment(Settings(**values), federation or tiny_federation(), method, model or TinyNet())


def trained(method: str | Method, **changes: Any) -> Experiment:
    experiment = built(method, **changes)
    experiment.train()
    return experiment


def watched(experiment: Experiment) -> list[tuple[Ask, dict[str, Reply]]]:
    """Train, and give every question of it with the replies."""
    seen: list[tuple[Ask, dict[str, Reply]]] = []
    reply = experiment.delivery.taken

    def watch(ask: Ask, outcome: Any) -> Any:
        made = reply(ask, outcome)
        if not seen or seen[-1][0] is not ask:
            seen.append((ask, {}))
        seen[-1][1][outcome.client] = made  # type: ignore[assignment]
        return made

    experiment.delivery.taken = watch  # type: ignore[method-assign]
    experiment.train()
    return seen


def client_of(experiment: Experiment, index: int = 0, round_number: int = 1) -> Client:
    """A client with what it keeps, ready to train."""
    data = experiment.federation.clients[index]
    kept = experiment.delivery.kept.get(data.id, Kept())
    client = Client(data, experiment.bench, kept, round_number)
    client.receive(experiment.server.outgoing(client.id))
    client.model.train()
    return client


def prepared_batch(client: Client, count: int = 4) -> tuple[Tensor, Tensor]:
    x, y = client.data.train.batch(slice(0, count))
    return client.bench.preparation.for_testing(x), y


@pytest.mark.parametrize("text", ["ccst(alpha=0.0)", "elcfs(weight=0.0)"])
def test_a_neutral_setting_is_fedavg_to_the_bit(text: str) -> None:
    assert not any(parse(text).fills(slot) for slot in SLOTS)
    assert not parse(text).facts.leaves
    assert digest(trained(text).snapshot()) == digest(trained("fedavg").snapshot())
    assert digest(trained(text.split("(")[0]).snapshot()) != digest(trained("fedavg").snapshot())


@pytest.mark.parametrize("name", ["ccst", "elcfs", "copa"])
def test_a_single_client_has_nobody_to_exchange_with(name: str) -> None:
    with pytest.raises(JoinError, match=f"Leave {name} out"):
        built(f"central + {name}")


@pytest.mark.parametrize("name", ["ccst", "elcfs"])
def test_inputs_that_are_no_images_are_refused(name: str) -> None:
    federation = tiny_federation()
    flat = [
        dataclasses.replace(c, train=ArrayExamples(c.train.batch(slice(None))[0].flatten(1), c.train.labels))
        for c in federation.clients
    ]
    flat = [dataclasses.replace(c, tests={}, validation=None) for c in flat]
    experiment = built(name, dataclasses.replace(federation, clients=tuple(flat), unseen={}), nn.Sequential(nn.Linear(192, 3)))
    with pytest.raises(DataError, match=r"images .* are needed"):
        experiment.train()


@pytest.mark.parametrize(
    "text",
    ["fedbn + ccst + agc", "fedbn + elcfs + fedprox(mu=0.1)", "elcfs + ccst", "fedbn + copa + agc", "copa + elcfs", "copa + ccst"],
)
def test_they_join_with_others(text: str) -> None:
    experiment = trained(text)
    assert all(torch.isfinite(value).all() for value in experiment.server.state.values())
    assert len(experiment.evaluate()) == 4


@pytest.mark.parametrize(
    "text",
    [
        'ccst(style="vgg")',
        'ccst(mode="both")',
        "ccst(copies=-1)",
        "ccst(alpha=1.5)",
        "elcfs(low=0.5)",
        "elcfs(share=0.0)",
        "elcfs(clip=0.0)",
        "copa(weight=-1.0)",
        'copa(norm="group")',
    ],
)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=text.partition("(")[0]):
        parse(text)


# ------------------------------------------------------------------------------------------------------------------ ccst
def test_the_text_always_says_which_style() -> None:
    assert str(parse("ccst")) == 'ccst(style="pixel")'
    assert "pixel" in " ".join(built("ccst").notices)


def test_restyled_images_have_the_style_and_keep_the_content() -> None:
    x, style = (
        torch.rand(2, 3, 5, 4, dtype=torch.float64) * 3,
        torch.tensor([[0.2, -1.0, 4.0], [0.5, 2.0, 1.0]], dtype=torch.float64),
    )
    found = restyled(x, style.expand(2, 2, 3), 0.75).numpy()
    for image in range(2):
        for channel in range(3):
            plane = x[image, channel].numpy()
            whole = (plane - np.mean(plane)) / np.sqrt(np.var(plane) + 1e-5) * float(style[1, channel]) + float(style[0, channel])
            np.testing.assert_allclose(found[image, channel], 0.25 * plane + 0.75 * whole, rtol=1e-12)


def raw_planes(client: Any) -> Any:
    """All pixels of a client by channel, in [0, 1]."""
    return np.moveaxis(client.train.batch(slice(None))[0].numpy(), 1, 0).reshape(3, -1) / 255


@pytest.mark.parametrize(("mode", "styles"), [("overall", (1, 1, 1)), ("single", (13, 8, 5))])
def test_ccst_sends_channel_statistics_once(mode: str, styles: tuple[int, ...]) -> None:
    experiment = built(f'ccst(mode="{mode}")')
    seen = watched(experiment)
    assert [ask.what for ask, _ in seen] == ["ccst_collect", "ccst_bank", "train", "train"]
    given = {client: reply.extras["given"] for client, reply in seen[0][1].items()}
    assert [tuple(given[name].shape) for name in ("big", "middle", "small")] == [(count, 2, 3) for count in styles]
    for client in experiment.federation.clients:
        pixels, told = raw_planes(client) * 2 - 1, given[client.id].numpy().astype(float)
        np.testing.assert_allclose(told[:, 0].mean(axis=0), pixels.mean(axis=1), rtol=1e-5, atol=1e-6)
        if mode == "overall":
            np.testing.assert_allclose(told[0, 1], np.sqrt(pixels.var(axis=1) + 1e-5), rtol=1e-5)
    bank = seen[1][0].payloads["big"].extras["bank"]
    assert [tensor is given[other] for tensor, other in zip(bank, ("middle", "small"), strict=True)] == [True, True]
    assert not any(reply.extras for _, replies in seen[1:] for reply in replies.values())
    sizes = [count * 2 * 3 * 4 for count in styles]
    assert experiment.ledger.bytes["up"]["training"][EXTRA] == sum(sizes)
    assert experiment.ledger.bytes["down"]["training"][EXTRA] == 2 * sum(sizes)


def restyle(experiment: Experiment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    client = client_of(experiment)
    x, y = prepared_batch(client)
    return x, y, *experiment.method.inputs[0](client, x, y)


def test_a_batch_holds_each_image_in_every_style() -> None:
    experiment = trained("ccst", rounds=1)
    x, y, many, labels = restyle(experiment)
    assert torch.equal(labels, y.repeat_interleave(3)) and torch.equal(many[::3], x)
    for index, other in enumerate(experiment.federation.clients[1:], start=1):
        pixels = raw_planes(other) * 2 - 1
        style = torch.tensor(np.stack((pixels.mean(axis=1), np.sqrt(pixels.var(axis=1) + 1e-5))), dtype=torch.float32)
        expected = restyled(x, style.expand(4, 2, 3), 1.0).clamp(-1, 1)
        torch.testing.assert_close(many[index::3], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("copies", "allowed"), [(1, {0, 1}), (2, {1, 2})])
def test_fewer_copies_draw_different_sources_for_each_image(copies: int, allowed: set[int]) -> None:
    experiment = trained(f'ccst(copies={copies}, mode="single")', rounds=1)
    restyled_per_image = set()
    for _ in range(8):
        x, _, many, labels = restyle(experiment)
        assert len(many) == len(labels) == 4 * copies and float(many.abs().max()) <= 1
        same = (many == x.repeat_interleave(copies, dim=0)).flatten(1).all(dim=1).view(4, copies)
        restyled_per_image |= set((~same).sum(dim=1).tolist())
    assert restyled_per_image == allowed


def test_more_copies_than_sources_are_refused() -> None:
    with pytest.raises(OptionError, match="only 3 sources"):
        built("ccst(copies=4)")


def test_a_client_that_missed_the_opening_says_so() -> None:
    experiment = built("ccst")
    client = client_of(experiment)
    with pytest.raises(ClientFailure, match="not there before round 1"):
        experiment.method.inputs[0](client, *prepared_batch(client))


# ----------------------------------------------------------------------------------------------------------------- elcfs
def numpy_mixed(image: Any, other: Any, ratio: float, half: int) -> Any:
    """One plane, coefficient by coefficient, without shifting: frequencies -half..half are the low ones."""
    spectrum, wanted = np.fft.fft2(image), np.fft.ifftshift(other)
    for row in range(-half, half + 1):
        for column in range(-half, half + 1):
            value = spectrum[row, column]
            spectrum[row, column] = (ratio * abs(value) + (1 - ratio) * wanted[row, column]) * np.exp(1j * np.angle(value))
    back = np.fft.ifft2(spectrum)
    assert np.abs(back.imag).max() < 1e-9
    return back.real


@pytest.mark.parametrize("half", [0, 1, 2])
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_low_frequencies_are_mixed_and_phases_kept(half: int, size: tuple[int, int]) -> None:
    images, sources = (torch.rand(2, 3, *size, dtype=torch.float64) * 255 for _ in range(2))
    others = torch.from_numpy(np.fft.fftshift(np.abs(np.fft.fft2(sources.numpy())), axes=(-2, -1)))
    ratio = torch.tensor([0.1, 0.7], dtype=torch.float64)
    found = mixed(images, others, ratio, half).numpy()
    for i in range(2):
        for c in range(3):
            expected = numpy_mixed(images[i, c].numpy(), others[i, c].numpy(), float(ratio[i]), half)
            np.testing.assert_allclose(found[i, c], expected, rtol=1e-9, atol=1e-9)
    if half == 0:
        shift = (1 - ratio.view(2, 1, 1, 1)) * (sources.mean(dim=(2, 3), keepdim=True) - images.mean(dim=(2, 3), keepdim=True))
        np.testing.assert_allclose(found, (images + shift).numpy(), rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "counts"), [("", (1, 1, 1)), ("share=0.5", (6, 4, 2)), ("share=0.5, aggregate=True", (1, 1, 1))]
)
def test_elcfs_sends_spectra_of_some_images_once(options: str, counts: tuple[int, ...]) -> None:
    experiment = built(f"elcfs({options})")
    seen = watched(experiment)
    assert [ask.what for ask, _ in seen] == ["elcfs_collect", "elcfs_bank", "train", "train"]
    given = {client: reply.extras["given"] for client, reply in seen[0][1].items()}
    assert [len(given[name]) for name in ("big", "middle", "small")] == list(counts)
    for client in experiment.federation.clients:
        share = 0.5 if "share" in options else 0.125
        order = torch.randperm(len(client.train), generator=generator(0, "client", 0, client.id))
        raw = client.train.batch(order[: max(1, int(share * len(client.train)))])[0].numpy()
        known = np.fft.fftshift(np.abs(np.fft.fft2(raw)), axes=(-2, -1))
        expected = known.mean(axis=0, keepdims=True) if "aggregate" in options else known
        np.testing.assert_allclose(given[client.id].numpy(), expected, rtol=0, atol=0.05)  # of amplitudes up to 8 * 8 * 255
    assert not any(reply.extras for _, replies in seen[1:] for reply in replies.values())
    assert experiment.ledger.bytes["up"]["training"][EXTRA] == sum(counts) * 3 * 8 * 8 * 4
    assert experiment.ledger.bytes["down"]["training"][EXTRA] == 2 * sum(counts) * 3 * 8 * 8 * 4
    assert "spectra" in experiment.method.facts.leaves and ("mean of" in experiment.method.facts.leaves) == ("aggregate" in options)


def test_mixed_images_stay_in_the_range_of_pixels() -> None:
    experiment = trained("elcfs(low=0.2)", rounds=1)
    client = client_of(experiment)
    x, _ = prepared_batch(client)
    term: OuterLoss = experiment.method.objective[0]  # type: ignore[assignment]
    made = term.images(client, x)
    assert made.shape == x.shape and not torch.allclose(made, x) and float(made.abs().max()) <= 1 + 1e-6
    client.memory["elcfs"] = [torch.zeros(1, 3, 4, 4)]
    with pytest.raises(ClientFailure, match="shape"):
        term.images(client, x)


class Fixed(OuterLoss):
    """The outer loss on images given once, so that it can be worked out by hand."""

    def images(self, client: Client, x: Tensor) -> Tensor:
        return x.flip(3) * 1.3 - 0.2


def in_double(federation: Federation) -> Federation:
    def doubled(part: Any) -> ArrayExamples:
        return ArrayExamples(part.batch(slice(None))[0].double() / 255, part.labels)

    clients = [
        dataclasses.replace(c, train=doubled(c.train), tests={k: doubled(t) for k, t in c.tests.items()})
        for c in federation.clients
    ]
    return dataclasses.replace(federation, clients=tuple(clients), unseen={})


def outer_gradient(term: OuterLoss) -> tuple[dict[str, Tensor], nn.Module, Tensor, Tensor]:
    """The gradient of task loss and outer loss together; the model, and the batch."""
    experiment = built("fedavg", in_double(tiny_federation()), TinyNet().double())
    client = client_of(experiment)
    x, y = prepared_batch(client, 6)
    before = copy.deepcopy(client.model)
    step = client.forward(0, x, y)
    statistics = {name: value.clone() for name, value in client.model.named_buffers()}
    (step.task_loss + term(step)).backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(value, statistics[name]) for name, value in client.model.named_buffers())
    return {n: p.grad for n, p in client.model.named_parameters() if p.grad is not None}, before, x, y


def slopes(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def moved(model: nn.Module, by: dict[str, Tensor], length: float) -> nn.Module:
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.add_(by[name], alpha=length)
    return made


@pytest.mark.parametrize("clip", [100.0, 0.02])
def test_the_outer_loss_is_a_gradient_through_a_step(clip: float) -> None:
    beta, weight = 0.5, 0.7
    found, model, x, y = outer_gradient(Fixed(0.01, beta, clip, weight, first_order=False))
    other = x.flip(3) * 1.3 - 0.2

    def total(at: nn.Module) -> float:
        inner = nn.functional.cross_entropy(at(x), y)
        step = {name: slope.clamp(-clip, clip) for name, slope in slopes(copy.deepcopy(at), x, y).items()}
        return float((inner + weight * nn.functional.cross_entropy(moved(at, step, -beta)(other), y)).detach())

    stream = torch.Generator().manual_seed(1)
    for _ in range(3):
        way = {n: torch.randn(p.shape, generator=stream, dtype=p.dtype) for n, p in model.named_parameters()}
        numeric = (total(moved(model, way, 1e-6)) - total(moved(model, way, -1e-6))) / 2e-6
        assert sum(float((found[n] * w).sum()) for n, w in way.items()) == pytest.approx(numeric, rel=1e-4, abs=1e-6)


def test_first_order_takes_the_gradient_at_the_stepped_weights() -> None:
    found, model, x, y = outer_gradient(Fixed(0.01, 0.5, 0.02, 0.7, first_order=True))
    inner = slopes(model, x, y)
    stepped = moved(model, {n: torch.from_numpy(np.clip(v.numpy(), -0.02, 0.02)) for n, v in inner.items()}, -0.5)
    outer = slopes(stepped, x.flip(3) * 1.3 - 0.2, y)
    for name, value in found.items():
        torch.testing.assert_close(value, inner[name] + 0.7 * outer[name], rtol=1e-9, atol=1e-12)
    assert digest(trained("elcfs(first_order=True)").snapshot()) != digest(trained("elcfs").snapshot())


# ------------------------------------------------------------------------------------------------------------------ copa
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
    for client, kept in parent.delivery.kept.items():
        assert all(torch.equal(found.delivery.kept[client].entries[name], value) for name, value in kept.entries.items())


HEAD_NAMES = {"head.weight", "head.bias"}


def test_heads_go_up_and_all_other_heads_come_down() -> None:
    experiment = built("copa", rounds=3)
    seen = watched(experiment)
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
    assert experiment.ledger.bytes["down"]["training"][EXTRA] == 2 * 3 * 2 * (3 * 8 + 3) * 4


def test_the_term_is_the_sum_over_the_other_heads_and_leaves_the_own_head_alone() -> None:
    experiment = trained("copa(weight=0.5)", rounds=1)
    client = client_of(experiment, round_number=2)
    client.extras = experiment.server.message(client.id).extras
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
    made = experiment.talk(experiment.method.newcomer(experiment.server))  # type: ignore[misc]
    assert [weight for weight, _ in made.models] == pytest.approx([1 / 3] * 3)
    assert len({state["stem.0.weight"].data_ptr() for _, state in made.models}) == 1
    local = [experiment.delivery.kept[c].entries["stem.1.weight"] * n for c, n in {"big": 13, "middle": 8, "small": 5}.items()]
    torch.testing.assert_close(made.models[0][1]["stem.1.weight"], torch.stack(local).sum(dim=0) / 26)
    for client, (_, state) in zip(("big", "middle", "small"), made.models, strict=True):
        assert torch.equal(state["head.bias"], experiment.delivery.kept[client].entries["head.bias"])


def test_only_heads_of_clients_that_trained_are_filed() -> None:
    experiment = built("copa", rounds=1, clients_per_round=0.6)
    seen = watched(experiment)
    assert set(heads_of(experiment.server)) == set(seen[0][1]) and len(seen[0][1]) == 2
    untrained = built("copa")
    assert len(untrained.talk(untrained.method.newcomer(untrained.server)).models) == 1  # type: ignore[misc]


def test_a_rejected_reply_files_no_head() -> None:
    experiment = built("copa", rounds=1, min_share=0.3)
    reply = experiment.delivery.taken

    def spoil(ask: Ask, outcome: Any) -> Any:
        made = reply(ask, outcome)
        if made is not None and outcome.client == "small":
            made.payload.entries["head.bias"].fill_(float("nan"))
        return made

    experiment.delivery.taken = spoil  # type: ignore[method-assign]
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
