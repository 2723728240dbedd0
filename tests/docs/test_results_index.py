"""The index of results: its verdicts follow from the tables of the pages, and orders in words on those pages are true of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.scripts import loaded
from polyfed.experiments.files import item_names, read_item

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
REPRODUCED = ROOT / "docs" / "results" / "reproduced"
CHECKED = re.compile(r"<!-- checked: (?P<heading>.+?) / (?P<column>(?:unseen: )?[^:]+): (?P<statements>.+?) -->")
ORDER_WORDS = re.compile(
    r"\b(above|below|best|worst|highest|lowest|first|second|leads?|level|behind|ahead|gains?|loses?|helps|hurts)\b"
)
NO_ORDER_OF_A_TABLE = {
    "FedWon leads at each of the three scorings": "by seed, which the tables do not show",
    "Both lie below the published numbers": "against other tables",
    "USPS is six points below the paper": "against the paper",
    "FedProx is 3.6 points above FedAvg with seed 0": "by seed",
    "FixBN's row in the table above cannot be ranked": "says where the table is",
}


@pytest.fixture(scope="module")
def index() -> ModuleType:
    return loaded(ROOT / "docs" / "results_index.py")


def test_every_experiment_has_one_row_with_its_command() -> None:
    lines = (ROOT / "docs" / "results" / "index.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and "polyfed reproduce" in line]
    assert [row[0].removeprefix("| ") for row in rows] == item_names()
    assert all(f"`polyfed reproduce {name} --root DATA`" in row[-1] for name, row in zip(item_names(), rows, strict=True))


def test_verdicts_say_no_more_than_seeds_carry(index: ModuleType) -> None:
    def verdict(high: tuple[float, float], low: tuple[float, float], seeds: str = "0, 1") -> str:
        numbers = [index.Number(*each, seeds) for each in (high, low)]
        return str(index.Measured("o", ("a", "b"), *numbers, "p.md", "s").verdict)

    assert verdict((88.8, 0.6), (87.1, 0.1)) == index.HOLDS
    assert verdict((22.3, 4.8), (35.1, 3.0)) == index.DOES_NOT
    assert verdict((85.5, 0.5), (86.5, 0.6)) == verdict((34.2, 5.9), (40.8, 1.2)) == index.UNDECIDED
    assert verdict((40.0, 1.0), (39.5, 1.0)) == index.UNDECIDED and verdict((40.0, 0.0), (40.0, 0.0)) == index.UNDECIDED
    assert verdict((40.0, 0.0), (20.0, 0.0), "0") == index.HELD_ONCE and verdict((40.0, 0.0), (40.0, 0.0), "0") == index.FAILED_ONCE


def test_numbers_are_read_from_the_pages_and_wrong_names_are_errors(index: ModuleType) -> None:
    page = (ROOT / "docs" / "results" / "digits-five.md").read_text()
    found = index.number("digits-five.md", "Accuracy, %", "FedBN", "mean")
    row = next(line for line in page.split("## Accuracy, %\n")[1].splitlines() if line.startswith("| FedBN |"))
    assert f"**{found}**" in row and row.endswith(f"| {found.seeds} |")
    for wrong in (("No heading", "FedBN", "mean"), ("Accuracy, %", "FedBM", "mean"), ("Accuracy, %", "FedBN", "men")):
        with pytest.raises(SystemExit):
            index.number("digits-five.md", *wrong)


def test_readme_and_index_say_how_many_seeds_there_are(index: ModuleType) -> None:
    measured = [one for many in index.measured().values() for one in many]
    assert max(len(number.seeds.split(",")) for one in measured for number in (one.high, one.low)) == 2, "mend both sentences"
    texts = [" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/results/index.md")]
    assert "none has more than two seeds" in texts[0] and "With two seeds, which is all that any row has so far" in texts[1]


@pytest.mark.parametrize("page", sorted(REPRODUCED.glob("*/*.md")), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_of_reproduce_is_of_its_experiment_and_its_verdicts_follow_from_its_numbers(index: ModuleType, page: Path) -> None:
    item, found = read_item(f"{page.parent.name}/{page.stem.removesuffix('-reduced')}"), index.read_page(page)
    text = page.read_text()
    assert found.title == f"{item.paper}, {item.item}: {item.title}" and f"Published claim: {item.claim}" in text
    assert ("Reduced form: this is not the paper's setting." in text) == page.stem.endswith("-reduced")
    assert found.seeds and f"`polyfed reproduce {item.name}" in text
    lines = [line for line in text.splitlines() if line.startswith("* ") and " > " in line and not line.endswith(": not run")]
    assert len(found.orders) == len(lines), "an order of the page cannot be read"
    for one in found.orders:
        assert one.order in item.orders
        higher = float(one.high) > float(one.low)
        assert one.verdict in ((index.HOLDS, index.HELD_ONCE) if higher else (index.DOES_NOT, index.FAILED_ONCE)) or (
            one.verdict == index.UNDECIDED and "," in found.seeds
        )
        assert ("one seed" in one.verdict) == ("," not in found.seeds)


def test_a_page_that_names_a_folder_of_this_machine_is_not_published(tmp_path: Path) -> None:
    publish = loaded(ROOT / "docs" / "results" / "publish.py").publish
    page, to = tmp_path / "out" / "table-1.md", tmp_path / "docs"
    page.parent.mkdir()
    (page.parent / "table-1-1.svg").write_text("<svg/>")
    page.write_text("# T\n\n![curves](table-1-1.svg)\n")
    assert publish(page, "fedwon/table-1", to).read_text() == page.read_text()
    assert (to / "fedwon" / "table-1-1.svg").read_text() == "<svg/>"
    page.write_text("* run: there is no /home/ann/data/office\n")
    with pytest.raises(SystemExit, match="/home/ann/data/office"):
        publish(page, "fedwon/table-1", to)


def test_the_paper_s_own_setting_comes_before_others_and_the_reduced_form_decides_nothing(
    index: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, order = "fedwon/table-1", "Digits-Five, avg: FedWon > FedBN"
    full = index.ReproducedPage("p.md", "t", "0", (index.ReproducedOrder(order, index.HELD_ONCE, "88", "87", "p.md", "0"),))
    item = read_item(name)
    monkeypatch.setattr(index, "reproduced", lambda form="": {} if form else {name: full})
    found = index.answers()[name]
    assert [one.order for one in found].count(order) == 1 and found[0] is full.orders[0]
    assert index.verdict_of(item, found[:1], None) == f"{index.HELD_ONCE} (1 of 3 orders run)"
    assert "88 and 87 (the paper's setting but for what the page marks; seed 0; [page](p.md))" in index.numbers_of(
        item, found[:1], None
    )
    assert index.verdict_of(item, [], full) == index.REDUCED_ONLY and index.verdict_of(item, [], None) == index.NOT_RUN
    assert f"reduced: {order}: 88 and 87; seed 0, [page](p.md); in full about " in index.numbers_of(item, [], full)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_orders_in_words_are_those_of_the_tables(index: ModuleType, page: Path) -> None:
    """A comment after a claim says it in a form that can be checked: HEADING / COLUMN: A > B by 1.5; C < others but D."""
    for found in CHECKED.finditer(page.read_text()):
        cells = {row: index.number(page.name, found["heading"], row, found["column"]).value for row in rows_of(index, page, found)}
        for statement in found["statements"].split("; "):
            assert is_true(statement, cells), f"{page.name}: {statement} ({found['heading']}, {found['column']})"


def rows_of(index: ModuleType, page: Path, found: re.Match[str]) -> list[str]:
    rows = index.page_table(page.name, found["heading"])
    return [row for row, cells in rows.items() if cells.get(found["column"]) not in ("–", "?")]


def is_true(statement: str, cells: Mapping[str, float]) -> bool:
    """Whether a statement is true of the cells of a column; a row that is not there is an error."""
    if others := re.fullmatch(r"(.+) ([<>]) others(?: but (.+))?", statement):
        name, sign, but = others.groups()
        rest = [value for row, value in cells.items() if row not in (name, *(but or "").split(", "))]
        return bool(rest) and all(value < cells[name] if sign == ">" else value > cells[name] for value in rest)
    if level := re.fullmatch(r"(.+) = (.+) within ([\d.]+)", statement):
        return abs(cells[level[1]] - cells[level[2]]) <= float(level[3])
    order = re.fullmatch(r"(.+) > (.+?)(?: by ([\d.]+))?", statement)
    assert order is not None, f"cannot read {statement!r}"
    difference = cells[order[1]] - cells[order[2]]
    return difference > 0 if order[3] is None else abs(difference - float(order[3])) < 0.051


def test_statements_are_judged_by_the_cells() -> None:
    cells = {"A": 50.0, "B": 48.5, "C": 60.0}
    true = ("A > B", "A > B by 1.5", "C > others", "B < others", "A > others but C", "A = B within 1.5")
    false = ("B > A", "A > B by 1.6", "A > others", "A < others", "C > A by 9", "A = B within 1.4")
    assert all(is_true(each, cells) for each in true) and not any(is_true(each, cells) for each in false)
    with pytest.raises(KeyError):
        is_true("A > D", cells)
    with pytest.raises(AssertionError, match="cannot read"):
        is_true("A is best", cells)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_sentence_in_bold_that_names_an_order_is_checked(page: Path) -> None:
    for item in re.findall(r"^\* \*\*(?:(?!^\* |^\n|^#).*\n)+", page.read_text(), re.MULTILINE):
        bold = " ".join(item.split("**")[1].split())
        if ORDER_WORDS.search(bold) and not any(bold.startswith(each) for each in NO_ORDER_OF_A_TABLE):
            assert CHECKED.search(item), f"{page.name}: add a comment that can be checked after: {bold}"


def test_the_readme_counts_each_measured_order_once(index: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(name: str, high: float, low: float, seeds: str = "0, 1") -> object:
        return index.Measured(name, ("a", "b"), index.Number(high, 1.0, seeds), index.Number(low, 1.0, seeds), "pacs.md", "s")

    a_paper, another = [order("x > y", 50, 40), order("y > z", 40, 50)], [order("x > y", 50, 40), order("z > x", 40.5, 40)]
    another += [order("y > x", 40, 50, "0"), order("x > z", 50, 40, "0")]
    monkeypatch.setattr(index, "measured", lambda: {"fedwon/table-1": a_paper, "fedbn/table-1": another})
    monkeypatch.setattr(index, "reproduced", lambda form="": {})
    row = index.summary_table("docs/results").splitlines()[-1]
    assert row.startswith("| [PACS, 20 rounds") and row.endswith("(docs/results/pacs.md) | 1 | 1 | 1 | 2 |")
