"""Compare two methods on the same test images with McNemar's exact test and a bootstrap over images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest

from polyfed.studies.report.words import points

RESAMPLES = 2000
SEED = 20240607
Answers = Mapping[tuple[str, str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class ImageTest:
    """The difference between two methods on the same test images.

    Attributes:
        images: Number of test images.
        only_first: Images that only the first method classified correctly, with ``seed``.
        only_second: Images that only the second method classified correctly, with ``seed``.
        p_value: Two-sided p-value of McNemar's exact test on these counts.
        seed: The first shared seed.
        seeds: Number of shared seeds.
        low: Lower end of the 95 % bootstrap interval of the difference between means over domains, averaged over shared seeds.
        high: Upper end of this interval.
    """

    images: int
    only_first: int
    only_second: int
    p_value: float
    seed: int
    seeds: int
    low: float
    high: float

    @property
    def summary(self) -> str:
        p_value = f"{self.p_value:.3f}" if self.p_value >= 0.001 else f"{self.p_value:.1g}"
        return (
            f"with seed {self.seed}, on the same {self.images:,} test images, only the first method is correct on {self.only_first:,} and "
            f"only the second on {self.only_second:,} (McNemar's exact test: p = {p_value}). Bootstrap over test images, "
            f"{'one seed' if self.seeds == 1 else f'averaged over {self.seeds} seeds'}: 95 % interval "
            f"{points(self.low, True)} to {points(self.high, True)} points."
        )


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    >>> mcnemar(8, 2), mcnemar(0, 0)
    (0.109375, 1.0)
    """
    differing = only_first + only_second
    return float(binomtest(only_first, differing).pvalue) if differing else 1.0


def _correct_by_domain(answers: Answers, view: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, per domain, which predictions are correct and the labels; the test sets of several clients are concatenated."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (of, _, domain), one in sorted(answers.items()):
        if of == view:
            labels = np.asarray(one["labels"])
            found.setdefault(domain, []).append((np.asarray(one["answers"]) == labels, labels))
    return {d: (np.concatenate([r for r, _ in many]), np.concatenate([y for _, y in many])) for d, many in found.items()}


def image_test(first: Mapping[int, Answers], second: Mapping[int, Answers], view: str, balanced: bool = False) -> ImageTest | None:
    """Compare the predictions of two methods per seed; return None if they have no seed with the same images.

    Args:
        first: Predictions of one method by seed.
        second: Predictions of the other method by seed.
        view: seen or unseen.
        balanced: Compare balanced accuracy, so resample images within their classes.
    """
    shared = [seed for seed in first if seed in second]
    pairs = {seed: (_correct_by_domain(first[seed], view), _correct_by_domain(second[seed], view)) for seed in shared}
    pairs = {seed: pair for seed, pair in pairs.items() if pair[0] and _same_images(*pair)}
    if not pairs:
        return None
    domains = list(next(iter(pairs.values()))[0])
    if any(list(one) != domains for one, _ in pairs.values()):
        return None
    seed, (one, other) = next(iter(pairs.items()))
    only_first = sum(int((one[d][0] & ~other[d][0]).sum()) for d in domains)
    only_second = sum(int((other[d][0] & ~one[d][0]).sum()) for d in domains)
    low, high = _interval(list(pairs.values()), domains, balanced)
    images = sum(len(one[d][0]) for d in domains)
    return ImageTest(images, only_first, only_second, mcnemar(only_first, only_second), seed, len(pairs), low, high)


def _same_images(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if the labels of all domains are equal, which indicates the same images."""
    return list(one) == list(other) and all(np.array_equal(one[d][1], other[d][1]) for d in one)


def _interval(pairs: list[tuple[Any, Any]], domains: list[str], balanced: bool) -> tuple[float, float]:
    generator = np.random.default_rng(SEED)
    total = np.zeros(RESAMPLES)
    for domain in domains:
        labels = pairs[0][0][domain][1]
        differences = [one[domain][0].astype(float) - other[domain][0] for one, other in pairs]
        if all(np.array_equal(labels, one[domain][1]) for one, _ in pairs):
            strata = [_strata(np.mean(differences, axis=0), labels, balanced)]
        else:  # the seeds use different test splits
            strata = [_strata(found, one[domain][1], balanced) for found, (one, _) in zip(differences, pairs, strict=True)]
        drawn = [np.mean([_resampled(part, generator) for part in parts], axis=0) for parts in strata]
        total += np.mean(drawn, axis=0)
    total /= len(domains)
    low, high = np.percentile(total, [2.5, 97.5])
    return float(low), float(high)


def _strata(difference: np.ndarray, labels: np.ndarray, balanced: bool) -> list[np.ndarray]:
    return [difference[labels == c] for c in np.unique(labels)] if balanced else [difference]


def _resampled(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the means of all resamples, drawing the counts of the few distinct values from a multinomial distribution."""
    levels, counts = np.unique(values, return_counts=True)
    drawn = generator.multinomial(len(values), counts / len(values), size=RESAMPLES)
    found: np.ndarray = drawn @ levels / len(values)
    return found
