"""Tests of rankings in the claims of a paper (``part, column: ROW > OTHER``), over seeds and over test images."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import ttest_1samp

from polyfed.errors import SettingError
from polyfed.papers.files import PaperItem
from polyfed.papers.grid import folder_of, sources_of
from polyfed.papers.ledger import LAST_ONLY
from polyfed.papers.reproduction import MADE, Outcome, Reproduction, Trained
from polyfed.studies.report.paired_tests import mcnemar

_ORDER = re.compile(r"(?:(?P<part>.+), )?(?P<column>[^:]+): (?P<high>.+) > (?P<low>.+)")
CONFIRMED, NOT_CONFIRMED, UNDECIDED = "confirmed", "not confirmed", "cannot be distinguished"
ONE_SEED, NOT_COMPARABLE, NOT_RUN, REDUCED_ONLY = "one seed only", "not comparable", "not run", "reduced form only"
STATUSES = (NOT_CONFIRMED, UNDECIDED, ONE_SEED, NOT_COMPARABLE, CONFIRMED, REDUCED_ONLY, NOT_RUN)
"""All statuses. A claim with several rankings has the first of these statuses that one of its rankings has."""
_SIGNIFICANT = 0.05
_ENOUGH_SEEDS = 3
"""With fewer shared seeds, a t-test over seeds has no power, so test images must decide."""
APART = 2
"""With two seeds, the mean difference must exceed this many standard deviations of the difference over seeds."""
_ROUNDING = 1e-6
_UNLIKE = ("bfloat16", LAST_ONLY)
"""Marks that both cells of a ranking must have in common."""


@dataclass(frozen=True)
class Order:
    """A ranking of two cells, the higher one first."""

    text: str
    part: str
    column: str
    high: str
    low: str


@dataclass(frozen=True)
class Images:
    """Numbers of test images that one of two methods classifies correctly with more of the shared seeds. Each image counts once."""

    count: int
    only_high: int
    only_low: int

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the exact sign test over images. With one seed, this is McNemar's test."""
        return mcnemar(self.only_high, self.only_low)


@dataclass(frozen=True)
class JudgedOrder:
    """A ranking with its two cells.

    Attributes:
        order: The ranking in the claim.
        form: Form of the runs.
        high: The cell that should be higher.
        low: The cell that should be lower.
        images: Comparison on the same test images; None if the records have no predictions.
    """

    order: Order
    form: str
    high: Outcome
    low: Outcome
    images: Images | None = None

    @property
    def is_run(self) -> bool:
        """Return True if both cells have runs."""
        return all(one.values or one.diverged for one in (self.high, self.low))

    @cached_property
    def differences(self) -> dict[int, float]:
        """``high`` minus ``low`` for each shared seed."""
        return {seed: self.high.values[seed] - self.low.values[seed] for seed in self.high.values if seed in self.low.values}

    @cached_property
    def signs(self) -> dict[int, int]:
        """Sign of the difference per seed. If only one method diverged, the other one wins this seed."""
        found = {seed: (value > 0) - (value < 0) for seed, value in self.differences.items()}
        found |= {seed: 1 for seed in self.low.diverged if seed in self.high.values}
        found |= {seed: -1 for seed in self.high.diverged if seed in self.low.values}
        found |= {seed: 0 for seed in self.high.diverged if seed in self.low.diverged}
        return dict(sorted(found.items()))

    @property
    def p_seeds(self) -> float | None:
        """The two-sided p-value of the paired t-test over seeds; None with fewer than three pairs or equal differences."""
        values = list(self.differences.values())
        if len(values) < _ENOUGH_SEEDS or statistics.stdev(values) < _ROUNDING:
            return None
        return float(ttest_1samp(values, 0.0).pvalue)

    @property
    def status(self) -> str:
        """The status of this ranking according to the runs.

        The ranking is decided if all shared seeds have the same sign, the seeds decide (``_seeds_decide``), and the test over images, if
        available, is significant in the same direction. It is also decided if one method diverged with at least two shared seeds, the
        other with none, and no finished pair contradicts.
        """
        if not self.is_run or not self.signs:
            return NOT_RUN
        if self.form == "reduced":
            return REDUCED_ONLY
        if self.high.cell.stands_in or self.low.cell.stands_in or self._marks(self.high) != self._marks(self.low):
            return NOT_COMPARABLE
        if len(self.signs) == 1:
            return ONE_SEED
        (sign, *others) = set(self.signs.values())
        if others or sign == 0:
            return UNDECIDED
        diverged = len(self.signs) - len(self.differences)
        images_decide = self.images is None or (self._images_agree(sign) and self.images.p_value < _SIGNIFICANT)
        if diverged < 2 and not (self._seeds_decide() and images_decide):
            return UNDECIDED
        return CONFIRMED if sign > 0 else NOT_CONFIRMED

    def _seeds_decide(self) -> bool:
        """Require a significant t-test, or with two seeds a test over images and a mean of more than two standard deviations."""
        values = list(self.differences.values())
        if len(values) >= _ENOUGH_SEEDS:
            return self.p_seeds is not None and self.p_seeds < _SIGNIFICANT
        return len(values) == 2 and self.images is not None and abs(statistics.fmean(values)) > APART * statistics.stdev(values)

    @staticmethod
    def _marks(one: Outcome) -> set[str]:
        return {note for note in one.notes if note in _UNLIKE}

    def _images_agree(self, sign: int) -> bool:
        assert self.images is not None
        return (self.images.only_high - self.images.only_low) * sign > 0

    def describe_tests(self) -> str:
        results = []
        values = list(self.differences.values())
        if len(values) > 1:
            tested = "" if self.p_seeds is None else f", paired t-test p = {_p(self.p_seeds)}"
            mean = f"{statistics.fmean(values):+.2g}".replace("-", "−")
            results.append(f"{mean} ± {statistics.stdev(values):.2g} over {len(values)} seeds{tested}")
        if self.images is not None:
            results.append(
                f"sign test over {self.images.count:,} images ({self.images.only_high:,} against {self.images.only_low:,}) "
                f"p = {_p(self.images.p_value)}"
            )
        lost = [
            f"{one.cell.row.name} diverged with seed {', '.join(map(str, one.diverged))}"
            for one in (self.high, self.low)
            if one.diverged
        ]
        return "; ".join([*results, *lost]) or "no test"

    def __str__(self) -> str:
        if not self.is_run:
            return f"{self.order.text}: {NOT_RUN}"
        form = "" if self.form == "full" else f"{self.form} form, "
        return f"{self.order.text}: {self.status} ({form}{self.high.words()} and {self.low.words()}; {self.describe_tests()})"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}" if value else "0"


def status_of(orders: Sequence[JudgedOrder]) -> str:
    """Return the status of a claim: the least favourable status of its rankings that were run."""
    found = [one.status for one in orders]
    run = [each for each in found if each not in (NOT_RUN, REDUCED_ONLY)]
    return next(each for each in STATUSES if each in (run or found or [NOT_RUN]))


def orders_of(item: PaperItem) -> list[Order]:
    return [_order(item, text) for text in item.orders]


def _order(item: PaperItem, text: str) -> Order:
    found = _ORDER.fullmatch(text)
    if found is None:
        raise SettingError(f"{item.name}: cannot parse the ranking {text!r}. Write: part, column: ROW > OTHER.")
    parts = [part for part in item.parts if part.name == (found["part"] or part.name)]
    for part in parts:
        names = {row.name for row in part.rows}
        if {found["high"], found["low"]} <= names and found["column"] in {column.name for column in part.columns}:
            return Order(text, part.name, found["column"], found["high"], found["low"])
    raise SettingError(f"{item.name}: the experiment has no such part, row or column as in the ranking {text!r}.")


@dataclass(frozen=True)
class PublishedOrder:
    """A ranking with the published numbers; None for a number that the paper does not print."""

    order: Order
    high: float | None
    low: float | None

    @property
    def holds(self) -> bool | None:
        """True if the published numbers have this ranking; None if one is missing."""
        return None if self.high is None or self.low is None else self.high > self.low

    def __str__(self) -> str:
        shown = ["not printed" if value is None else f"{value:g}" for value in (self.high, self.low)]
        return f"{self.order.text}: {shown[0]} and {shown[1]}"


def published_orders(item: PaperItem) -> list[PublishedOrder]:
    found = []
    for order in orders_of(item):
        part = next(each for each in item.parts if each.name == order.part)
        place = [column.name for column in part.columns].index(order.column)
        rows = {row.name: row.published[place].value for row in part.rows}
        found.append(PublishedOrder(order, rows[order.high], rows[order.low]))
    return found


def judged_orders(found: Reproduction) -> list[JudgedOrder]:
    places = [(part.name, row.name, column.name) for part in found.item.parts for row in part.rows for column in part.columns]
    ours = dict(zip(places, found.outcomes, strict=True))
    tested = []
    for order in orders_of(found.item):
        high, low = (ours[order.part, row, order.column] for row in (order.high, order.low))
        tested.append(JudgedOrder(order, found.form.name, high, low, images_of(found, high, low)))
    return tested


def images_of(found: Reproduction, high: Outcome, low: Outcome) -> Images | None:
    """Compare two cells on the test images that both read, averaged over the shared seeds.

    Returns:
        None if a record has no predictions, if its scores are the mean of several rounds (the predictions are those of the last round), or
        if the cells do not show accuracy.
    """
    column = high.cell.column
    if column.number or column.minus or high.cell.part.score != "accuracy" or not (high.values and low.values):
        return None
    leads: dict[tuple[int, tuple[str, str, str]], np.ndarray] = {}
    for place, (mine, theirs) in enumerate(zip(sources_of(high.cell, found.form), sources_of(low.cell, found.form), strict=True)):
        if mine.settings is None or theirs.settings is None:
            return None
        first, second = (_by_seed(found, folder_of(each)) for each in (mine.settings, theirs.settings))
        for seed in first.keys() & second.keys() & high.values.keys() & low.values.keys():
            records = first[seed].record, second[seed].record
            one, other = (record.is_right() for record in records)
            keys = list(_read_keys(one, mine.column.read))
            if any(len(record.last_rounds) > 1 for record in records) or not keys:
                return None
            for key in keys:
                before = leads.get((place, key), np.zeros(len(one[key]), dtype=int))
                if key not in other or not len(one[key]) == len(other[key]) == len(before):
                    return None
                leads[place, key] = before + one[key].astype(int) - other[key].astype(int)
    net = np.concatenate(list(leads.values())) if leads else np.zeros(0)
    return Images(len(net), int((net > 0).sum()), int((net < 0).sum())) if len(net) else None


def _by_seed(found: Reproduction, folder: str) -> dict[int, Trained]:
    return {one.seed: one for one in found.trained.get(folder, [])}


def _read_keys(answers: Iterable[tuple[str, str, str]], read: str) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of the predictions that a column reads: all seen domains, all unseen ones, or one domain."""
    for key in answers:
        view, _, domain = key
        if (read == "mean" and view == "seen") or (read == "unseen" and view == "unseen") or domain in (read, read + MADE):
            yield key
