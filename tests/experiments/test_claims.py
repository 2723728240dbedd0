"""The status of an order: hand-computed cases over seeds, images, ties, one seed and diverged runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from helpers.records import made_record
from polyfed.experiments.claims import Images, JudgedOrder, judged_orders, status_of
from polyfed.experiments.files import item_from
from polyfed.experiments.grid import Form
from polyfed.experiments.ledger import Ledger, Record
from polyfed.experiments.reproduction import from_ledger

ITEM = """\
title = "t"
paper = "Tiny"
item = "Table 1"
claim = "High is above low."
orders = ["avg: High > Low", "a: High > Low"]
measure = "accuracy, percent"
seeds = 3
[settings]
data = "digits-mini"
[[part]]
columns = ["a", { name = "avg", read = "mean" }]
[part.rows]
High = { method = "fedbn", published = "60.0 60.0" }
Low = { method = "fedavg", published = "50.0 50.0" }
"""
NAN = math.nan


def records(method: str, scores: Mapping[int, float], right: Mapping[int, list[bool]] | None = None) -> list[Record]:
    return [made_record(method, seed, score, None if right is None else right.get(seed)) for seed, score in scores.items()]


def judged(high: list[Record], low: list[Record]) -> JudgedOrder:
    return judged_orders(from_ledger(item_from("tiny/table-1", ITEM), Form(), Ledger([*high, *low])))[0]


def case(high: Mapping[int, float], low: Mapping[int, float]) -> JudgedOrder:
    return judged(records("fedbn", high), records("fedavg", low))


def test_seeds_decide_by_a_paired_t_test() -> None:
    one = case({0: 0.60, 1: 0.62, 2: 0.61}, {0: 0.50, 1: 0.53, 2: 0.51})
    # Differences 10, 9 and 10 points: mean 29/3, deviation 1/sqrt(3), t = 29 with two degrees of freedom.
    assert one.status == "confirmed" and list(one.differences) == [0, 1, 2]
    t = 29.0
    assert one.p_seeds == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6), (
        "the distribution function for two degrees of freedom"
    )
    assert one.p_seeds == pytest.approx(ttest_rel([60, 62, 61], [50, 53, 51]).pvalue)
    assert case({0: 0.50, 1: 0.53, 2: 0.51}, {0: 0.60, 1: 0.62, 2: 0.61}).status == "not confirmed"


def test_seeds_that_disagree_or_are_noisy_cannot_be_distinguished() -> None:
    assert case({0: 0.90, 1: 0.50}, {0: 0.50, 1: 0.51}).status == "cannot be distinguished"
    noisy = case({0: 0.52, 1: 0.70}, {0: 0.50, 1: 0.50})
    assert noisy.status == "cannot be distinguished" and noisy.p_seeds is not None and noisy.p_seeds > 0.3
    assert case({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}).status == "cannot be distinguished", "a tie"
    assert case({0: 0.6, 1: 0.5}, {0: 0.5, 1: 0.5}).status == "cannot be distinguished", "one seed is a tie"


def test_only_shared_seeds_count() -> None:
    one = case({0: 0.6, 5: 0.9}, {0: 0.5, 6: 0.1})
    assert one.status == "one seed only" and one.p_seeds is None and list(one.signs) == [0]
    assert case({0: 0.6}, {1: 0.5}).status == "not run" and case({}, {0: 0.5}).status == "not run"


def test_diverged_seeds_are_lost_by_the_method_that_diverged() -> None:
    assert case({0: 0.6, 1: NAN, 2: NAN}, {0: 0.5, 1: 0.5, 2: 0.5}).signs == {0: 1, 1: -1, 2: -1}
    assert case({0: 0.6, 1: NAN}, {0: 0.5, 1: 0.5}).status == "cannot be distinguished"
    assert case({0: NAN, 1: NAN}, {0: 0.5, 1: 0.5}).status == "not confirmed"
    won = case({0: 0.6, 1: 0.6}, {0: NAN, 1: NAN})
    assert won.status == "confirmed" and "Low diverged with seed 0, 1" in str(won) and won.low.words() == "diverged"
    assert case({0: NAN, 1: NAN}, {0: NAN, 1: NAN}).status == "cannot be distinguished"
    assert case({0: NAN}, {0: 0.5}).status == "one seed only"
    assert case({0: 0.6, 1: 0.7, 2: NAN}, {}).high.words() == "65.0 ± 7.1 (1 of 3 diverged)"


def test_images_are_paired_over_the_shared_seeds_and_tested_as_mcnemar_does() -> None:
    right = {0: [True] * 12 + [False] * 8, 1: [True] * 14 + [False] * 6, 2: [True] * 20}
    wrong = {0: [True] * 4 + [False] * 15 + [True], 1: [False] * 5 + [True] * 10 + [False] * 5}
    one = judged(records("fedbn", {0: 0.52, 1: 0.70, 2: 0.9}, right), records("fedavg", {0: 0.50, 1: 0.50}, wrong))
    # Seed 0: images 4 to 11 only the first, image 19 only the second. Seed 1: images 0 to 4 only the first, image 14 only the second.
    assert one.images == Images(40, 13, 2)
    assert one.images.p_value == pytest.approx(2 * binom.cdf(2, 15, 0.5)) == pytest.approx(2 * (1 + 15 + 105) / 2**15)
    assert one.status == "confirmed" and one.p_seeds is not None and one.p_seeds > 0.05, "decided by the images"
    assert "McNemar over 40 images (13 against 2) p = 0.007" in str(one)
    against = judged(records("fedbn", {0: 0.52, 1: 0.70}, wrong), records("fedavg", {0: 0.50, 1: 0.50}, right))
    assert against.status == "cannot be distinguished", "images say the opposite of the means over domains"


def test_other_images_or_none_give_no_image_test() -> None:
    right, short = {0: [True] * 8, 1: [True] * 8}, {0: [True] * 8, 1: [False] * 7}
    scores = {0: 0.5, 1: 0.6}
    assert judged(records("fedbn", scores, right), records("fedavg", scores, short)).images is None
    assert judged(records("fedbn", scores, right), records("fedavg", scores)).images is None


def test_a_claim_has_the_least_favourable_status_of_the_orders_that_were_run() -> None:
    confirmed = case({0: 0.60, 1: 0.62, 2: 0.61}, {0: 0.50, 1: 0.53, 2: 0.51})
    refuted = case({0: 0.50, 1: 0.53, 2: 0.51}, {0: 0.60, 1: 0.62, 2: 0.61})
    tie, once, never = case({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}), case({0: 0.6}, {0: 0.5}), case({}, {})
    assert status_of([confirmed, never]) == "confirmed" and status_of([never]) == status_of([]) == "not run"
    assert status_of([confirmed, once]) == "one seed only" and status_of([once, tie, confirmed]) == "cannot be distinguished"
    assert status_of([tie, refuted, confirmed]) == "not confirmed"


def test_bits_of_any_length_come_back() -> None:
    generator = np.random.default_rng(0)
    for count in (1, 7, 8, 9, 1000):
        bits = generator.random(count) < 0.5
        record = made_record("fedbn", 0, 0.5, bits.tolist())
        assert record.is_right()["seen", "a", "a"].tolist() == bits.tolist()
