"""RSC: the mask against numpy, and the loss on masked features."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.tiny_runs import batch_of, trained
from polyfed.errors import ModelError
from polyfed.methods.rsc import challenge
from polyfed.testing import TinyNet


def test_rsc_mask_against_numpy() -> None:
    stream = torch.Generator().manual_seed(2)
    head = nn.Linear(9, 4)
    z, y = torch.randn(7, 9, generator=stream), torch.randint(4, (7,), generator=stream)
    w, b = head.weight.detach().numpy(), head.bias.detach().numpy()
    # The gradient of a linear head's logit y is the row y of its weight.
    gradient = w[y.numpy()]
    kept = gradient < np.percentile(gradient, 100 * (1 - 1 / 3), axis=1, keepdims=True)

    def chosen(features: Any) -> Any:
        logits = features @ w.T + b
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return (odds / odds.sum(1, keepdims=True))[np.arange(7), y.numpy()]

    change = chosen(z.numpy()) - chosen(z.numpy() * kept)
    expected = kept | (change < np.percentile(change, 100 * (1 - 1 / 3)))[:, None]
    found = challenge(head, z, y, 1 / 3, 1 / 3)
    np.testing.assert_array_equal(found.numpy().astype(bool), expected)
    assert head.weight.grad is None and 0 < expected.sum() < expected.size


def test_rsc_loss_is_taken_on_masked_features_and_reaches_the_network() -> None:
    experiment = trained("rsc", rounds=1)
    client, x, y = batch_of(experiment)
    twin = copy.deepcopy(experiment.bench.model).train()
    experiment.bench.model.train()
    step = client.forward(0, x, y)
    stem = twin.stem(x)  # type: ignore[operator]
    z = torch.relu(stem + twin.branch(stem)).mean(dim=(2, 3))  # type: ignore[operator]
    mask = challenge(twin.head, z, y, 1 / 3, 1 / 3)  # type: ignore[arg-type]
    by_hand = F.cross_entropy(twin.head(z * mask), y)  # type: ignore[operator]
    torch.testing.assert_close(step.task_loss, by_hand)
    experiment.bench.model.zero_grad()
    step.task_loss.backward()  # type: ignore[no-untyped-call]
    (expected,) = torch.autograd.grad(by_hand, [twin.get_parameter("stem.0.weight")])
    torch.testing.assert_close(experiment.bench.parameters["stem.0.weight"].grad, expected, rtol=1e-4, atol=1e-6)
    assert int(experiment.bench.live["stem.1.num_batches_tracked"]) == int(twin.stem[1].num_batches_tracked)  # type: ignore[index, union-attr]


def test_rsc_needs_to_know_the_head() -> None:
    class Doubtful(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ModelError, match=r"rsc needs the model's output layer.*--head"):
        trained("rsc", model=Doubtful())
