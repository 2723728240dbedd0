"""The status of a ranking: hand-computed cases over seeds, images, ties, one seed and diverged runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from helpers.records import made_record
from polyfed.papers.claims import Images, JudgedOrder, judged_orders, status_of
from polyfed.papers.files import item_from
from polyfed.papers.grid import Form
from polyfed.papers.ledger import Ledger, Record
from polyfed.papers.reproduction import from_ledger

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
    noisy = case({0: 0.52, 1: 0.70, 2: 0.51}, {0: 0.50, 1: 0.50, 2: 0.50})
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


RIGHT = {seed: [True] * 12 + [False] * 8 for seed in range(3)}
WRONG = {seed: [True] * 2 + [False] * 17 + [True] for seed in range(3)}
"""Only the first method classifies images 2 to 11 correctly, only the second image 19."""


def test_an_image_counts_once_however_many_seeds_there_are() -> None:
    one = judged(records("fedbn", {0: 0.61, 1: 0.61}, RIGHT), records("fedavg", {0: 0.50, 1: 0.51}, WRONG))
    assert one.images == Images(20, 10, 1)
    assert one.images.p_value == pytest.approx(2 * binom.cdf(1, 11, 0.5)) == pytest.approx(2 * (1 + 11) / 2**11)
    # Image 0: one seed for each method, a tie. Image 1: the first in one seed, both in the other.
    mixed = judged(
        records("fedbn", {0: 0.6, 1: 0.6}, {0: [True, True], 1: [False, True]}),
        records("fedavg", {0: 0.5, 1: 0.5}, {0: [False, False], 1: [True, True]}),
    )
    assert mixed.images == Images(2, 1, 0)


def test_two_seeds_need_images_and_a_difference_beyond_two_deviations() -> None:
    apart = judged(records("fedbn", {0: 0.61, 1: 0.61}, RIGHT), records("fedavg", {0: 0.50, 1: 0.51}, WRONG))
    assert apart.status == "confirmed" and apart.p_seeds is None, "differences 11 and 10: mean 10.5, deviation 0.7"
    assert "+10 ± 0.71 over 2 seeds; sign test over 20 images (10 against 1) p = 0.012" in str(apart)
    near = judged(records("fedbn", {0: 0.61, 1: 0.54}, RIGHT), records("fedavg", {0: 0.50, 1: 0.50}, WRONG))
    assert near.status == "cannot be distinguished", "differences 11 and 4: mean 7.5, deviation 4.9"
    assert case({0: 0.61, 1: 0.61}, {0: 0.50, 1: 0.51}).status == "cannot be distinguished", "no images"
    assert case({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6}).status == "cannot be distinguished", "equal differences prove nothing"


def test_images_and_seeds_must_both_decide() -> None:
    same = {seed: [True] * 10 + [False] * 10 for seed in range(3)}
    clear = {0: 0.60, 1: 0.62, 2: 0.61}, {0: 0.50, 1: 0.53, 2: 0.51}
    assert judged(records("fedbn", clear[0], same), records("fedavg", clear[1], same)).status == "cannot be distinguished"
    assert judged(records("fedbn", clear[0], RIGHT), records("fedavg", clear[1], WRONG)).status == "confirmed"
    against = judged(records("fedbn", clear[0], WRONG), records("fedavg", clear[1], RIGHT))
    assert against.status == "cannot be distinguished", "images say the opposite of the means over domains"
    noisy = {0: 0.51, 1: 0.53, 2: 0.81}, {0: 0.50, 1: 0.50, 2: 0.50}
    assert judged(records("fedbn", noisy[0], RIGHT), records("fedavg", noisy[1], WRONG)).status == "cannot be distinguished"


def test_answers_of_one_round_do_not_test_a_mean_of_several() -> None:
    averaged = [dataclasses.replace(one, last_rounds=[1, 2]) for one in records("fedbn", {0: 0.6, 1: 0.6}, RIGHT)]
    assert judged(averaged, records("fedavg", {0: 0.5, 1: 0.5}, WRONG)).images is None


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
