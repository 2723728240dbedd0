"""The index of results: one row for each experiment with the status of its claim, decided from the ledger alone.

docs/generate.py writes the table into docs/results/index.md, and the five headline claims into README.md.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from method_tables import table

from polyfed.papers.claims import (
    NOT_COMPARABLE,
    NOT_RUN,
    ONE_SEED,
    REDUCED_ONLY,
    JudgedOrder,
    PublishedOrder,
    judged_orders,
    published_orders,
    status_of,
)
from polyfed.papers.costs import core_hours
from polyfed.papers.files import FORMS, PaperItem, item_names, read_item
from polyfed.papers.grid import Form, cells_of, planned_runs
from polyfed.papers.ledger import LAST_ONLY, Ledger
from polyfed.papers.reproduction import Reproduction, from_ledger

HEADLINES = ("fedwon/table-1", "fixbn/table-5", "fedstein/table-1", "gperxan/table-2", "hfedf/table-11")
HEAD = ("experiment", "claim", "status", "published", "ours, or core-hours (full, laptop)", "tests")
Made = Callable[[str, str, Ledger], Reproduction]


def sibling(name: str) -> ModuleType:
    """Another script of this folder."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Answer:
    """What the ledger has on one experiment.

    Attributes:
        item: the experiment.
        tested: its orders, each in the largest form that was run.
        shown: the experiment in the largest form that has a number, or None.
        reason: why its runs cannot be compared with the paper's; used while no order was run.
    """

    item: PaperItem
    tested: Sequence[JudgedOrder]
    shown: Reproduction | None = None
    reason: str = ""

    @property
    def run(self) -> list[JudgedOrder]:
        """Orders with runs, without those of the reduced form if there are others."""
        found = [one for one in self.tested if one.is_run]
        return [one for one in found if one.form != "reduced"] or found

    @property
    def status(self) -> str:
        """One of the seven words."""
        if self.run:
            return status_of(self.run)
        if self.shown is not None and not self.item.orders:
            seeds = {seed for one in self.shown.outcomes for seed in one.values}
            return REDUCED_ONLY if self.shown.form.name == "reduced" else ONE_SEED if len(seeds) < 2 else NOT_COMPARABLE
        return NOT_COMPARABLE if self.reason else NOT_RUN

    @property
    def seeds(self) -> str:
        """The seeds that both cells of an order share; of a claim without orders, those of its numbers."""
        found = [set(one.signs) for one in self.run]
        if not found and self.shown is not None and not self.item.orders:
            found = [set(one.values) for one in self.shown.outcomes if one.values]
        names = list(dict.fromkeys(", ".join(map(str, sorted(seeds))) for seeds in found if seeds))
        return "; ".join(names)

    @property
    def form(self) -> str:
        """The forms of the runs that count."""
        forms = {one.form for one in self.run} or (
            {self.shown.form.name} if self.shown is not None and not self.item.orders else set()
        )
        return ", ".join(form for form in FORMS if form in forms)

    def published(self) -> str:
        """The published numbers of the orders that were run, else of the first one."""
        known: dict[str, PublishedOrder] = {one.order.text: one for one in published_orders(self.item)}
        chosen = [known[one.order.text] for one in self.run] or [one for one in known.values() if one.holds is not None][:1]
        return "; ".join(map(str, chosen))

    def ours(self) -> str:
        """Our numbers, or what a run would cost."""
        if self.run:
            return "; ".join(f"{one.high.words()} and {one.low.words()}{marks(one)}" for one in self.run)
        if self.shown is not None and not self.item.orders:
            cells = [f"{one.cell.row.name}, {one.cell.column.name} {one.words()}" for one in self.shown.outcomes if one.values]
            return "; ".join(cells[:6]) + ("; ..." if len(cells) > 6 else "")
        return estimate(self.item)

    def tests(self) -> str:
        """The paired tests of the orders, and how many were run."""
        if not self.run:
            return self.reason
        lacking = len(self.item.orders) - len(self.run)
        told = [f"{one.order.text}: {one.describe_tests()}" if len(self.run) > 1 else one.describe_tests() for one in self.run]
        return "; ".join([*told, *([f"{lacking} of {len(self.item.orders)} rankings not run"] if lacking else [])])

    def row(self) -> list[str]:
        """The row of the index; the status is alone in the third column."""
        runs = f" [{self.form}; seeds {self.seeds}]" if self.seeds else ""
        cells = [self.item.name, self.item.claim, self.status, self.published(), self.ours() + runs, self.tests()]
        return [cell.replace("|", "\\|") for cell in cells]


def marks(one: JudgedOrder) -> str:
    """In what precision or rounds the runs of an order differ from the paper's setting."""
    known = ("bfloat16", "channels_last", "fused", LAST_ONLY)
    found = [note for note in known if any(note in cell.notes for cell in (one.high, one.low))]
    return f" ({', '.join(found)})" if found else ""


def estimate(item: PaperItem) -> str:
    """What the experiment would cost in the full and the laptop form."""
    words = []
    for name in ("full", "laptop"):
        form = Form(name)
        hours = core_hours(planned_runs(cells_of(item, form), form).values())
        words.append("?" if hours is None else f"{hours:,.1f}")
    return "; ".join(words)


def answer(item: PaperItem, ledger: Ledger, reason: str = "", made: Made | None = None) -> Answer:
    """What a ledger has on an experiment: each order in the first form, from full to reduced, in which both of its cells have runs.

    Args:
        item: the experiment.
        ledger: the records.
        reason: why its runs cannot be compared with the paper's.
        made: makes the reproduction by name, form and ledger; default: from the item.
    """
    found = {form: from_ledger(item, Form(form), ledger) if made is None else made(item.name, form, ledger) for form in FORMS}
    by_form = {form: judged_orders(one) for form, one in found.items()}
    chosen = []
    for place in range(len(item.orders)):
        runs = [by_form[form][place] for form in FORMS]
        chosen.append(next((one for one in runs if one.is_run), runs[0]))
    shown = next((one for one in found.values() if any(each.values for each in one.outcomes)), None)
    return Answer(item, chosen, shown, reason)


@functools.cache
def answers() -> Mapping[str, Answer]:
    """Every experiment, from the repository's ledger."""
    pages = sibling("results_pages")
    ledger, reasons = pages.ledger_in(pages.RUNS), pages.Explanations.read().not_comparable
    return {name: answer(read_item(name), ledger, reasons.get(name, ""), pages.reproduction) for name in item_names()}


def pages_list() -> str:
    """Links to the pages of data sets."""
    pages = sibling("results_pages")
    names = sorted({pages.data_slug(str(one.settings["data"])) for one in pages.ledger_in(pages.RUNS).records})
    return "Tables, curves and runs: " + ", ".join(f"[{pages.TITLES.get(name, name)}]({name}.md)" for name in names) + "."


def index_table() -> str:
    """One row for each experiment."""
    return table(HEAD, [one.row() for one in answers().values()])


def summary_table(folder: str) -> str:
    """The five headline claims, for the README."""
    rows = []
    for name in HEADLINES:
        one = answers()[name]
        ours = one.ours() if one.run else NOT_RUN
        cells = [
            f"[{one.item.paper}, {one.item.item}]({folder}/index.md)",
            one.item.claim,
            one.published(),
            ours,
            one.seeds or "–",
            one.status
            + (f" ({len(one.run)} of {len(one.tested)} rankings run)" if len(one.run) < len(one.tested) and one.run else ""),
        ]
        rows.append([cell.replace("|", "\\|") for cell in cells])
    return table(("paper", "claim", "published", "ours", "seeds", "status"), rows)
