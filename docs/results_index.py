"""The table of docs/results/index.md: every experiment's published claim, and whether the measured tables beside it bear it out.

Numbers are read from the tables of the pages in docs/results, as docs/results/measured.toml says; nothing is typed in. docs/generate.py
writes the table.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from polyfed.experiments.budget import core_hours
from polyfed.experiments.claims import (
    DOES_NOT,
    FAILED_ONCE,
    HELD_ONCE,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    orders_of,
    published_orders,
    verdict,
)
from polyfed.experiments.files import PaperItem, item_names, read_item
from polyfed.experiments.grid import Form, cells_of, planned_runs
from polyfed.reports.method_tables import table

PAGES = Path(__file__).parent / "results"
CELL = re.compile(r"\**(?P<value>\d+(?:\.\d+)?)(?: ± (?P<spread>\d+(?:\.\d+)?))?\**")


@dataclass(frozen=True)
class Number:
    """A measured cell: its value, its deviation over seeds, and the seeds."""

    value: float
    spread: float
    seeds: str

    @property
    def is_of_one_seed(self) -> bool:
        """Whether nothing is known of other seeds."""
        return "," not in self.seeds

    def __str__(self) -> str:
        return f"{self.value:.1f}" + (f" ± {self.spread:.1f}" if self.spread else "")


@dataclass(frozen=True)
class Measured:
    """One order of a claim with the two numbers that answer it."""

    order: str
    names: tuple[str, str]
    high: Number
    low: Number
    page: str
    setting: str

    @property
    def verdict(self) -> str:
        """What the numbers carry: no more than their deviations over seeds allow."""
        once = self.high.is_of_one_seed or self.low.is_of_one_seed
        return verdict(self.high.value - self.low.value, math.nan if once else math.hypot(self.high.spread, self.low.spread))

    def __str__(self) -> str:
        return (
            f"{self.order}: {self.names[0]} {self.high}, {self.names[1]} {self.low} ({self.setting}; "
            f"{'seed' if self.high.is_of_one_seed else 'seeds'} {self.high.seeds}; "
            f"[{self.page.removesuffix('.md')}]({self.page}))"
        )


def page_table(page: str, heading: str) -> dict[str, dict[str, str]]:
    """The first table under a heading of a page: rows by their first cell, cells by the head."""
    text = (PAGES / page).read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)
    if len(section) != 2:
        raise SystemExit(f"{page} has no heading {heading!r}, which docs/results/measured.toml names.")
    lines = [line for line in section[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows: dict[str, dict[str, str]] = {}
    for line in cells[2:]:
        if len(line) != len(cells[0]) or line[0] in rows:
            break
        rows[line[0]] = dict(zip(cells[0], line, strict=True))
    return rows


def number(page: str, heading: str, row: str, column: str) -> Number:
    """One measured number; a row or column that the page does not have is an error."""
    rows = page_table(page, heading)
    if row not in rows or column not in rows[row]:
        raise SystemExit(f"{page}, {heading!r}: no cell {row!r}, {column!r}, which docs/results/measured.toml names.")
    found = CELL.fullmatch(rows[row][column])
    if found is None:
        raise SystemExit(f"{page}, {heading!r}: {rows[row][column]!r} in {row!r}, {column!r} is no number.")
    return Number(float(found["value"]), float(found["spread"] or 0), rows[row].get("seeds", "?"))


def measured() -> dict[str, list[Measured]]:
    """What was measured, by experiment; an order that an experiment does not name is an error."""
    found: dict[str, list[Measured]] = {}
    for one in tomllib.loads((PAGES / "measured.toml").read_text(encoding="utf-8"))["measured"]:
        high, low = (number(one["page"], one["heading"], row, one["column"]) for row in one["rows"])
        for name in one["experiments"]:
            if one["order"] not in read_item(name).orders:
                raise SystemExit(f"docs/results/measured.toml: {name} names no order {one['order']!r}.")
            names = (one["rows"][0], one["rows"][1])
            found.setdefault(name, []).append(Measured(one["order"], names, high, low, one["page"], one["setting"]))
    return found


def verdict_of(item: PaperItem, many: list[Measured]) -> str:
    """Whether the claim holds here, as far as it was measured."""
    if not many:
        return NOT_RUN
    verdicts = [one.verdict for one in many]
    told = next(each for each in (DOES_NOT, UNDECIDED, FAILED_ONCE, HELD_ONCE, HOLDS) if each in verdicts)
    orders = len(orders_of(item))
    return f"{told} ({len(many)} of {orders} order{'s' * (orders != 1)} run)"


def numbers_of(item: PaperItem, many: list[Measured]) -> str:
    """The measured numbers, or what was published and why nothing was measured."""
    if many:
        return "; ".join(map(str, many))
    published = [f"{one.order.text}: {one.high:g} and {one.low:g}" for one in published_orders(item) if one.high and one.low]
    shown = (
        f"published: {published[0]}"
        if published
        else "published only as a picture"
        if item.is_figure
        else "published: see its table"
    )
    hours = [core_hours(planned_runs(cells_of(item, form), form).values()) for form in (Form(), Form(reduced=True))]
    full, reduced = ("?" if each is None else f"{each:,.1f}" if each >= 0.05 else "below 0.1" for each in hours)
    return f"{shown}; about {full} core-hours, reduced {reduced}"


def index_table() -> str:
    """One row for each experiment."""
    answers = measured()
    rows = []
    for name in item_names():
        item, many = read_item(name), answers.get(name, [])
        rows.append([name, item.claim, verdict_of(item, many), numbers_of(item, many), f"`polyfed reproduce {name} --root DATA`"])
    return table(("experiment", "published claim", "here", "numbers", "command"), rows)


def summary_table(folder: str) -> str:
    """How many of the orders that papers claim hold on each page of results; ``folder`` leads to the pages."""
    pages: dict[str, dict[str, str]] = {}
    for many in measured().values():
        for one in many:
            pages.setdefault(one.page, {})[one.order] = one.verdict
    rows = []
    for page, verdicts in pages.items():
        title = (PAGES / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        wanted = ((HOLDS,), (DOES_NOT,), (UNDECIDED,), (HELD_ONCE, FAILED_ONCE))
        counts = [sum(verdict in each for verdict in verdicts.values()) for each in wanted]
        rows.append([f"[{title}]({folder}/{page})", *map(str, counts)])
    heads = ("orders of methods that papers claim: hold here", "do not hold", "cannot be told apart", "one seed only")
    return table(("measured on", *heads), rows)
