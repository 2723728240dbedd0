"""CCST: styles by hand, what travels, and the batches made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tiny_runs import built, client_of, prepared_batch, trained
from helpers.watching import exchanges
from polyfed.core.method import parse
from polyfed.errors import ClientFailure, OptionError
from polyfed.methods.ccst import restyled
from polyfed.runs.costs import EXTRA
from polyfed.runs.experiment import Experiment


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
    seen = exchanges(experiment)
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
    assert experiment.costs.bytes["up"]["training"][EXTRA] == sum(sizes)
    assert experiment.costs.bytes["down"]["training"][EXTRA] == 2 * sum(sizes)


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


def test_a_client_that_missed_the_setup_says_so() -> None:
    experiment = built("ccst")
    client = client_of(experiment)
    with pytest.raises(ClientFailure, match="absent from the exchange before round 1"):
        experiment.method.inputs[0](client, *prepared_batch(client))
