"""Claims that name an order, checked against numbers: ``part, column: ROW > OTHER``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from polyfed.errors import SettingError
from polyfed.experiments.files import PaperItem
from polyfed.experiments.reproduction import Reproduction

ORDER = re.compile(r"(?:(?P<part>.+), )?(?P<column>[^:]+): (?P<high>.+) > (?P<low>.+)")
Find = Callable[[str, str, str], tuple[float, float] | None]
HOLDS, DOES_NOT, UNDECIDED, NOT_RUN = "holds here", "does not hold here", "cannot be told apart here", "not run"
HELD_ONCE, FAILED_ONCE = "seen with one seed", "not seen with one seed"
"""What one seed shows is no more than that."""
APART = 2
"""So many joint deviations over seeds must lie between two numbers that are told apart."""


@dataclass(frozen=True)
class Order:
    """One order of two cells: the higher first."""

    text: str
    part: str
    column: str
    high: str
    low: str


@dataclass(frozen=True)
class Checked:
    """An order, with the numbers it was checked against; ``holds`` is None where one of them is missing.

    ``joint`` is their joint deviation over seeds, not a number where there is one seed; ``remark`` is said after the numbers.
    """

    order: Order
    high: float | None = None
    low: float | None = None
    joint: float = 0.0
    remark: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the order is that of the numbers."""
        return None if self.high is None or self.low is None else self.high > self.low

    def __str__(self) -> str:
        if self.high is None or self.low is None:
            return f"{self.order.text}: {NOT_RUN}"
        return f"{self.order.text}: {verdict(self.high - self.low, self.joint)} ({self.high:.4g} and {self.low:.4g}{self.remark})"


def verdict(difference: float, joint: float) -> str:
    """What a difference in the claimed direction carries, given the joint deviation over seeds (not a number: one seed)."""
    if math.isnan(joint):
        return HELD_ONCE if difference > 0 else FAILED_ONCE
    if abs(difference) <= APART * joint:
        return UNDECIDED
    return HOLDS if difference > 0 else DOES_NOT


def orders_of(item: PaperItem) -> list[Order]:
    """The orders an experiment names; parts, rows and columns that it does not have are refused."""
    return [_order(item, text) for text in item.orders]


def _order(item: PaperItem, text: str) -> Order:
    found = ORDER.fullmatch(text)
    if found is None:
        raise SettingError(f"{item.name}: cannot read the order {text!r}. Write: part, column: ROW > OTHER.")
    parts = [part for part in item.parts if part.name == (found["part"] or part.name)]
    for part in parts:
        names = {row.name for row in part.rows}
        if {found["high"], found["low"]} <= names and found["column"] in {column.name for column in part.columns}:
            return Order(text, part.name, found["column"], found["high"], found["low"])
    raise SettingError(f"{item.name}: the order {text!r} names a part, row or column that the experiment does not have.")


def published_orders(item: PaperItem) -> list[Checked]:
    """The orders, checked against the published numbers."""

    def find(part: str, row: str, column: str) -> tuple[float, float] | None:
        for each in item.parts:
            if each.name == part:
                for line in each.rows:
                    if line.name == row:
                        value = line.published[[c.name for c in each.columns].index(column)].value
                        return None if value is None else (value, 0.0)
        return None

    return [check(order, find) for order in orders_of(item)]


def checked_orders(found: Reproduction) -> list[Checked]:
    """The orders, checked against ours."""
    places = [(part.name, row.name, column.name) for part in found.item.parts for row in part.rows for column in part.columns]
    ours = dict(zip(places, found.outcomes, strict=True))

    def find(part: str, row: str, column: str) -> tuple[float, float] | None:
        one = ours[part, row, column]
        return None if one.mean is None else (one.mean, math.nan if one.spread is None else one.spread)

    checked = [check(order, find) for order in orders_of(found.item)]
    return checked if found.form.is_full else [dataclasses.replace(one, remark=f", {found.form.name} form") for one in checked]


def check(order: Order, find: Find) -> Checked:
    """One order against numbers that ``find(part, row, column)`` gives with their deviations, not a number for one seed."""
    high, low = find(order.part, order.high, order.column), find(order.part, order.low, order.column)
    if high is None or low is None:
        return Checked(order)
    return Checked(order, high[0], low[0], math.hypot(high[1], low[1]))
