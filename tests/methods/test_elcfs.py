"""ELCFS: spectra against numpy, what travels, and the outer loss by finite differences."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.tiny_runs import built, client_of, prepared_batch, trained
from helpers.watching import exchanges
from polyfed.core.client import Client
from polyfed.core.data_types import ArrayExamples, Federation
from polyfed.core.seeds import generator
from polyfed.errors import ClientFailure
from polyfed.methods.elcfs import OuterLoss, mixed
from polyfed.runs.costs import EXTRA
from polyfed.runs.folder.checkpoint import digest
from polyfed.testing import TinyNet, tiny_federation


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
    seen = exchanges(experiment)
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
    assert experiment.costs.bytes["up"]["training"][EXTRA] == sum(counts) * 3 * 8 * 8 * 4
    assert experiment.costs.bytes["down"]["training"][EXTRA] == 2 * sum(counts) * 3 * 8 * 8 * 4
    assert "spectra" in experiment.method.facts.data_derived_uploads and (
        "mean of" in experiment.method.facts.data_derived_uploads
    ) == ("aggregate" in options)


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
