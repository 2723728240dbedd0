"""Losses against numbers worked out in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyfed.errors import DataError, OptionError, UnknownName
from polyfed.tasks.losses import losses

LOGITS = np.array([[2.0, 0.5, -1.0], [0.1, 0.2, 0.3], [-3.0, 1.0, 4.0], [1.0, 1.0, 1.0]])
LABELS = np.array([0, 2, 1, 1])
FED_ISIC_COUNTS = (3332, 9084, 2649, 712, 1950, 184, 201, 485)


def right_probabilities() -> np.ndarray:
    powers = np.exp(LOGITS)
    shares: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return np.take_along_axis(shares, LABELS[:, None], axis=1).squeeze(1)


def test_cross_entropy() -> None:
    loss = losses.build("cross_entropy")
    assert float(loss(torch.tensor(LOGITS), torch.tensor(LABELS))) == pytest.approx(-np.log(right_probabilities()).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_weighted_focal(gamma: float) -> None:
    alpha = np.array([0.5, 2.0, 3.0])
    loss = losses.build(f"weighted_focal(gamma={gamma}, alpha=(0.5, 2, 3.0))")
    p = right_probabilities()
    expected = (-alpha[LABELS] * (1 - p) ** gamma * np.log(p)).mean()
    assert float(loss(torch.tensor(LOGITS), torch.tensor(LABELS))) == pytest.approx(expected)


def test_balanced_weights() -> None:
    of_fed_isic = (5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443)
    for counts, expected in ((FED_ISIC_COUNTS, of_fed_isic), ((30, 0, 10), (40 / 30, 0.0, 4.0))):
        loss = losses.build("weighted_focal(gamma=0.0)", class_counts=counts)
        even, classes = torch.zeros(1, len(counts), dtype=torch.float64), len(counts)
        weights = [float(loss(even, torch.tensor([label]))) / math.log(classes) for label in range(classes)]
        assert weights == pytest.approx(expected, abs=5e-5)


def test_gradient_against_finite_differences() -> None:
    loss = losses.build("weighted_focal(alpha=(1, 2, 3))")
    logits = torch.tensor(LOGITS, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, torch.tensor(LABELS)), logits)


def test_gradient_is_finite_when_sure() -> None:
    for gamma in [0.0, 0.5, 1.0, 2.0]:
        logits = torch.tensor([[500.0, 0.0], [-500.0, 0.0]], requires_grad=True)
        loss = losses.build(f"weighted_focal(gamma={gamma}, alpha=(1, 1))")(logits, torch.tensor([0, 0]))
        torch.autograd.backward(loss)
        assert torch.isfinite(loss)
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()


def test_wrong_options_are_refused() -> None:
    for text, said in [
        ('weighted_focal(alpha="equal")', "'balanced' or a list"),
        ("weighted_focal(gamma=-1.0, alpha=(1, 1))", "gamma must be at least 0"),
        ("weighted_focal(alpha=(1, -1))", "weight per class"),
        ("weighted_focal(alpha=3)", "weight per class"),
    ]:
        with pytest.raises(OptionError, match=said):
            losses.build(text)


def test_balanced_needs_counts_and_names_are_suggested() -> None:
    with pytest.raises(DataError, match="needs the number of training examples"):
        losses.build("weighted_focal")
    with pytest.raises(UnknownName, match="weighted_focal"):
        losses.build("weigted_focal")
    with pytest.raises(OptionError, match="2 weights, but the data has 3"):
        losses.build("weighted_focal(alpha=(1, 1))", class_counts=(1, 1, 1))
    with pytest.raises(OptionError, match="2 weights, but the logits have 3"):
        losses.build("weighted_focal(alpha=(1, 1))")(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))


def test_cross_entropy_with_class_weights_is_that_of_torch() -> None:
    logits, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1, 1, 2, 0, 0])
    weighted = losses.build('cross_entropy(class_weights="balanced")', class_counts=[5, 2, 1])
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([8 / 5, 4.0, 8.0]))
    torch.testing.assert_close(weighted(logits, labels), expected)
    assert losses.build("cross_entropy", class_counts=[5, 2, 1]) is losses.build("cross_entropy")
    with pytest.raises(OptionError, match="'balanced' or a list"):
        losses.build('cross_entropy(class_weights="even")', class_counts=[5, 2, 1])
