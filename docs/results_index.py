"""The table of docs/results/index.md: every experiment's published claim, and whether the measured tables beside it bear it out.

Numbers are read from pages that ``polyfed reproduce`` wrote (docs/results/reproduced) and from the tables of the other pages in
docs/results, as docs/results/measured.toml says; nothing is typed in. docs/generate.py writes the table.
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
REPRODUCED = PAGES / "reproduced"
REDUCED, REDUCED_ONLY = "-reduced", "run in the reduced form only, which decides nothing"
CHECKED = re.compile(
    r"\* (?P<order>.+ > .+): (?P<verdict>[a-z ]+) \((?P<high>[\d.e+-]+) and (?P<low>[\d.e+-]+)(?:, reduced form)?\)"
)
RUN = re.compile(r"\| .+ \| (?P<seed>\d+) \| `[0-9a-f]{16}` \| .+ \|")
CELL = re.compile(r"\**(?P<value>\d+(?:\.\d+)?)(?: ± (?P<spread>\d+(?:\.\d+)?))?\**(?: \([\d.]+\))?")


def seeds_words(seeds: str) -> str:
    """The seeds of a number, as a table says them."""
    return f"{'seeds' if ',' in seeds else 'seed'} {seeds}"


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
            f"{seeds_words(self.high.seeds)}; "
            f"[{self.page.removesuffix('.md')}]({self.page}))"
        )


@dataclass(frozen=True)
class ReproducedOrder:
    """One order of a claim as a page of ``polyfed reproduce`` has it."""

    order: str
    verdict: str
    high: str
    low: str
    page: str
    seeds: str

    def __str__(self) -> str:
        return f"{self.order}: {self.high} and {self.low}"


@dataclass(frozen=True)
class ReproducedPage:
    """A page that ``polyfed reproduce`` wrote; ``seeds`` are those of its runs."""

    path: str
    title: str
    seeds: str
    orders: tuple[ReproducedOrder, ...]

    def __str__(self) -> str:
        orders = "".join(f"{order}; " for order in self.orders)
        return f"{orders}{seeds_words(self.seeds)}, [page]({self.path})"


def reproduced(form: str = "") -> dict[str, ReproducedPage]:
    """The pages of ``polyfed reproduce`` by experiment: those of the full form, or of the reduced one."""
    found = {}
    for page in sorted(REPRODUCED.glob("*/*.md")):
        name = page.relative_to(REPRODUCED).with_suffix("").as_posix()
        if name.endswith(REDUCED) == (form == REDUCED):
            found[name.removesuffix(REDUCED)] = read_page(page)
    return found


def read_page(page: Path) -> ReproducedPage:
    """What the index says of a page."""
    text, path = page.read_text(encoding="utf-8"), page.relative_to(PAGES).as_posix()
    lines = text.splitlines()
    seeds = ", ".join(sorted({found["seed"] for line in lines if (found := RUN.fullmatch(line))}, key=int))
    checked = [found.groupdict() for line in lines if (found := CHECKED.fullmatch(line))]
    return ReproducedPage(
        path, lines[0].removeprefix("# "), seeds, tuple(ReproducedOrder(**one, page=path, seeds=seeds) for one in checked)
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


def answers() -> dict[str, list[Measured | ReproducedOrder]]:
    """What answers to each experiment's orders: a run of the paper's own setting before one that differs."""
    found: dict[str, list[Measured | ReproducedOrder]] = {name: list(page.orders) for name, page in reproduced().items()}
    for name, many in measured().items():
        answered = {one.order for one in found.get(name, [])}
        found.setdefault(name, []).extend(one for one in many if one.order not in answered)
    return found


def verdict_of(item: PaperItem, many: list[Measured | ReproducedOrder], short: ReproducedPage | None) -> str:
    """Whether the claim holds here, as far as it was measured."""
    if not many:
        return NOT_RUN if short is None else REDUCED_ONLY
    verdicts = [one.verdict for one in many]
    told = next(each for each in (DOES_NOT, UNDECIDED, FAILED_ONCE, HELD_ONCE, HOLDS) if each in verdicts)
    orders = len(orders_of(item))
    return f"{told} ({len(many)} of {orders} order{'s' * (orders != 1)} run)"


def numbers_of(item: PaperItem, many: list[Measured | ReproducedOrder], short: ReproducedPage | None) -> str:
    """The measured numbers, or what was published and why nothing was measured."""
    if many:
        told = [str(one) if isinstance(one, Measured) else in_full(one) for one in many]
        return "; ".join([*told, *([f"[reduced form]({short.path})"] if short else [])])
    published = [f"{one.order.text}: {one.high:g} and {one.low:g}" for one in published_orders(item) if one.high and one.low]
    shown = (
        f"published: {published[0]}"
        if published
        else "published only as a picture"
        if item.is_figure
        else "published: see its table"
    )
    hours = [core_hours(planned_runs(cells_of(item, form), form).values()) for form in (Form(), Form("reduced"))]
    full, reduced = ("?" if each is None else f"{each:,.1f}" if each >= 0.05 else "below 0.1" for each in hours)
    if short is not None:
        return f"{shown}; reduced: {short}; in full about {full} core-hours"
    return f"{shown}; about {full} core-hours, reduced {reduced}"


def in_full(one: ReproducedOrder) -> str:
    """An order that was run with the paper's setting."""
    return f"{one} (the paper's setting but for what the page marks; {seeds_words(one.seeds)}; [page]({one.page}))"


def index_table() -> str:
    """One row for each experiment."""
    found, shorter = answers(), reproduced(REDUCED)
    rows = []
    for name in item_names():
        item, many, short = read_item(name), found.get(name, []), shorter.get(name)
        command = f"`polyfed reproduce {name} --root DATA`"
        rows.append([name, item.claim, verdict_of(item, many, short), numbers_of(item, many, short), command])
    return table(("experiment", "published claim", "here", "numbers", "command"), rows)


def summary_table(folder: str) -> str:
    """How many of the orders that papers claim hold on each page of results; ``folder`` leads to the pages."""
    pages: dict[str, dict[str, str]] = {}
    counted: set[str] = set()
    for many in answers().values():
        for one in many:
            if isinstance(one, ReproducedOrder) and str(one) in counted:
                continue  # two tables of a paper that show the same runs
            counted.add(str(one))
            pages.setdefault(one.page, {})[one.order] = one.verdict
    rows = []
    for page, verdicts in pages.items():
        title = (PAGES / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        wanted = ((HOLDS,), (DOES_NOT,), (UNDECIDED,), (HELD_ONCE, FAILED_ONCE))
        counts = [sum(verdict in each for verdict in verdicts.values()) for each in wanted]
        rows.append([f"[{title}]({folder}/{page})", *map(str, counts)])
    heads = ("orders of methods that papers claim: hold here", "do not hold", "cannot be told apart", "one seed only")
    return table(("measured on", *heads), rows)
