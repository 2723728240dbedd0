"""Two methods on the same test images: McNemar's exact test, and a bootstrap over images.

Seeds say how much is luck of training; these say how much is luck of the test images. Both are given, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest

RESAMPLES = 2000
SEED = 20240607
Answers = Mapping[tuple[str, str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class ImageTest:
    """How two methods differ on the same test images.

    Attributes:
        images: test images that both answered.
        only_first: images that only the first got right, over all seeds.
        only_second: images that only the second got right, over all seeds.
        p_value: of McNemar's exact test, two-sided; of the first seed that both have.
        seed: that seed.
        low: lower end of the 95 % bootstrap interval of the difference of the means over domains, over all shared seeds.
        high: upper end.
    """

    images: int
    only_first: int
    only_second: int
    p_value: float
    seed: int
    low: float
    high: float

    @property
    def words(self) -> str:
        """What was found, in a sentence."""
        p_value = f"{self.p_value:.3f}" if self.p_value >= 0.001 else f"{self.p_value:.1g}"
        return (
            f"On the same {self.images:,} test images the first alone is right {self.only_first:,} times, the second alone "
            f"{self.only_second:,} times; McNemar's exact test (seed {self.seed}): p = {p_value}. "
            f"Bootstrap over images, all shared seeds: 95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f} points."
        ).replace(" -", " −")


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test: under no difference, either is alone right equally often.

    >>> mcnemar(8, 2), mcnemar(0, 0)
    (0.109375, 1.0)
    """
    differing = only_first + only_second
    return float(binomtest(only_first, differing).pvalue) if differing else 1.0


def right_by_domain(answers: Answers, view: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each domain: whether each test image was answered rightly, and its label; several clients' tests one after the other."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (of, _, domain), one in sorted(answers.items()):
        if of == view:
            labels = np.asarray(one["labels"])
            found.setdefault(domain, []).append((np.asarray(one["answers"]) == labels, labels))
    return {d: (np.concatenate([r for r, _ in many]), np.concatenate([y for _, y in many])) for d, many in found.items()}


def image_test(first: Mapping[int, Answers], second: Mapping[int, Answers], view: str, balanced: bool = False) -> ImageTest | None:
    """Compare two methods by their answers for each seed; None where they do not share answers to the same images.

    Args:
        first: the answers of one method by seed.
        second: those of the other.
        view: seen or unseen.
        balanced: the difference is one of balanced accuracy, so images are drawn within their classes.
    """
    shared = [seed for seed in first if seed in second]
    pairs = {seed: (right_by_domain(first[seed], view), right_by_domain(second[seed], view)) for seed in shared}
    pairs = {seed: pair for seed, pair in pairs.items() if pair[0] and _same_images(*pair)}
    if not pairs:
        return None
    domains = list(next(iter(pairs.values()))[0])
    if any(list(one) != domains for one, _ in pairs.values()):
        return None
    counts = {
        seed: (
            sum(int((one[d][0] & ~other[d][0]).sum()) for d in domains),
            sum(int((other[d][0] & ~one[d][0]).sum()) for d in domains),
        )
        for seed, (one, other) in pairs.items()
    }
    seed = next(iter(pairs))
    low, high = _interval(list(pairs.values()), domains, balanced)
    images = sum(len(pairs[seed][0][d][0]) for d in domains)
    return ImageTest(
        images, sum(c for c, _ in counts.values()), sum(c for _, c in counts.values()), mcnemar(*counts[seed]), seed, low, high
    )


def _same_images(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs were tested on the same images, as far as labels tell."""
    return list(one) == list(other) and all(np.array_equal(one[d][1], other[d][1]) for d in one)


def _interval(pairs: list[tuple[Any, Any]], domains: list[str], balanced: bool) -> tuple[float, float]:
    """The 95 % bootstrap interval of the difference, averaged over seeds and domains."""
    generator = np.random.default_rng(SEED)
    total = np.zeros(RESAMPLES)
    for domain in domains:
        labels = pairs[0][0][domain][1]
        differences = [one[domain][0].astype(float) - other[domain][0] for one, other in pairs]
        if all(np.array_equal(labels, one[domain][1]) for one, _ in pairs):
            strata = [_strata(np.mean(differences, axis=0), labels, balanced)]
        else:  # the seeds were tested on different splits, so their images are not the same ones
            strata = [_strata(found, one[domain][1], balanced) for found, (one, _) in zip(differences, pairs, strict=True)]
        drawn = [np.mean([_resampled(part, generator) for part in parts], axis=0) for parts in strata]
        total += np.mean(drawn, axis=0)
    total /= len(domains)
    low, high = np.percentile(total, [2.5, 97.5])
    return float(low), float(high)


def _strata(difference: np.ndarray, labels: np.ndarray, balanced: bool) -> list[np.ndarray]:
    return [difference[labels == c] for c in np.unique(labels)] if balanced else [difference]


def _resampled(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Means of resamples. Few different values occur, so how often each is drawn is drawn at once."""
    levels, counts = np.unique(values, return_counts=True)
    drawn = generator.multinomial(len(values), counts / len(values), size=RESAMPLES)
    found: np.ndarray = drawn @ levels / len(values)
    return found
