"""Two methods on the same images: against scipy, and on cases whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from scipy.stats import binom

from polyfed.studies.report.paired_tests import image_test, mcnemar
from polyfed.studies.report.verdict import PairedDifference, _significance

if TYPE_CHECKING:
    from polyfed.studies.report.run_set import MethodRow


def answers(right: np.ndarray, labels: np.ndarray, domain: str = "a") -> dict[Any, Any]:
    given = np.where(right, labels, labels + 1)
    return {("seen", domain, domain): {"labels": labels, "answers": given, "confidence": np.ones(len(labels))}}


def test_mcnemar_is_the_exact_binomial_test() -> None:
    for first, second in ((8, 2), (1, 9), (5, 5), (0, 0), (30, 12)):
        tail = 2 * binom.cdf(min(first, second), first + second, 0.5) if first + second else 1.0
        assert mcnemar(first, second) == pytest.approx(min(1.0, tail))


def test_a_clear_difference_and_none() -> None:
    labels = np.arange(400) % 4
    rng = np.random.default_rng(0)
    poor, good = rng.random(400) < 0.5, rng.random(400) < 0.8
    found = image_test({0: answers(good, labels)}, {0: answers(poor, labels)}, "seen")
    assert found is not None and found.images == 400 and found.p_value < 1e-6
    assert found.only_first == int((good & ~poor).sum()) and found.only_second == int((poor & ~good).sum())
    difference = (good.mean() - poor.mean()).item()
    error = np.std(good.astype(float) - poor) / 20
    assert found.low == pytest.approx(difference - 1.96 * error, abs=0.01) and found.high == pytest.approx(
        difference + 1.96 * error, abs=0.01
    )
    assert "on the same 400 test images" in found.summary
    same = image_test({0: answers(good, labels)}, {0: answers(good, labels)}, "seen")
    assert same is not None and same.p_value == 1.0 and (same.low, same.high) == (0.0, 0.0)


def test_a_balanced_difference_is_one_of_recalls() -> None:
    labels = np.array([0] * 90 + [1] * 10)
    constant = labels == 0
    knows = np.ones(100, dtype=bool)
    found = image_test({0: answers(knows, labels)}, {0: answers(constant, labels)}, "seen", balanced=True)
    assert found is not None and found.low == found.high == pytest.approx(0.5)
    plain = image_test({0: answers(knows, labels)}, {0: answers(constant, labels)}, "seen")
    assert plain is not None and plain.high < 0.2


def test_seeds_are_paired_and_other_images_do_not_compare() -> None:
    labels = np.arange(50) % 2
    right = labels == 0
    assert image_test({0: answers(right, labels)}, {1: answers(right, labels)}, "seen") is None
    assert image_test({0: answers(right, labels)}, {0: answers(right, 1 - labels)}, "seen") is None
    assert image_test({0: {}}, {0: {}}, "seen") is None
    two = image_test(
        {0: answers(right, labels), 1: answers(~right, labels)}, {0: answers(right, labels), 1: answers(~right, labels)}, "seen"
    )
    assert two is not None and (two.seed, two.seeds) == (0, 2)


def test_counts_and_p_value_are_of_one_seed() -> None:
    labels = np.zeros(40, dtype=int)
    first, second = np.arange(40) < 9, np.arange(40) >= 38
    found = image_test(
        {0: answers(first, labels), 1: answers(~first, labels)}, {0: answers(second, labels), 1: answers(first, labels)}, "seen"
    )
    assert found is not None and (found.only_first, found.only_second) == (9, 2)
    assert found.p_value == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    sentences = found.summary.split(". ")
    assert "with seed 0" in sentences[0] and "p = 0.065" in sentences[0] and "averaged over 2 seeds" not in sentences[0]


def paired(only_first: int, only_second: int, test_error: float) -> PairedDifference:
    """Two methods that agree on all but some of 1,000 images."""
    labels = np.zeros(1000, dtype=int)
    first, second = np.zeros(1000, dtype=bool), np.zeros(1000, dtype=bool)
    first[:only_first], second[only_first : only_first + only_second] = True, True
    images = image_test({0: answers(first, labels)}, {0: answers(second, labels)}, "seen")
    ahead, behind = (cast("MethodRow", SimpleNamespace(method=label)) for label in ("one", "other"))
    return PairedDifference(ahead, behind, (only_first - only_second) / 1000, [0.0], test_error, images)


def test_there_is_one_verdict_and_it_is_the_paired_one() -> None:
    found = paired(20, 4, test_error=0.02)  # 1.6 points: within two unpaired errors (4 points), yet McNemar's p is 0.0015
    assert found.images is not None and found.images.p_value < 0.01
    assert found.verdict == "beyond the noise of the test sets; one seed"
    text = " ".join(_significance(found))
    assert "is beyond the noise of the test sets. one (first) compared with other (second)" in text and "p = 0.002" in text
    assert "given the test set sizes" not in text and "within" not in text and "disagrees" not in text
    level = paired(12, 11, test_error=0.0)  # beyond any unpaired noise, but the answers say that it is luck
    assert level.verdict == "within the noise of the test sets; one seed" and "is within the noise" in " ".join(
        _significance(level)
    )
    unpaired = PairedDifference(found.ahead, found.behind, 0.016, [0.0], 0.02)
    assert unpaired.verdict == "within the noise of the test sets; one seed" and "given the test set sizes" in " ".join(
        _significance(unpaired)
    )
