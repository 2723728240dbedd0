"""The index of results: its verdicts follow from the tables of the pages, and orders in words on those pages are true of them."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.scripts import loaded
from polyfed.experiments.files import item_names

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
ORDER = re.compile(
    r"(?P<one>[\w+][\w+ -]*?) is (?P<points>[\d.]+) points? (?P<way>above|below) (?P<other>[\w+ -]+?) \((?P<a>[\d.]+) against (?P<b>[\d.]+)\)"
)


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
    row = next(line for line in page.splitlines() if line.startswith("| FedBN |"))
    assert f"**{found}**" in row and row.endswith(f"| {found.seeds} |")
    for wrong in (("No heading", "FedBN", "mean"), ("Accuracy, %", "FedBM", "mean"), ("Accuracy, %", "FedBN", "men")):
        with pytest.raises(SystemExit):
            index.number("digits-five.md", *wrong)


def test_readme_and_index_say_how_many_seeds_there_are(index: ModuleType) -> None:
    measured = [one for many in index.measured().values() for one in many]
    assert max(len(number.seeds.split(",")) for one in measured for number in (one.high, one.low)) == 2, "mend both sentences"
    texts = [" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/results/index.md")]
    assert "none has more than two seeds" in texts[0] and "With two seeds, which is all that any row has so far" in texts[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_orders_in_words_are_those_of_the_tables(page: object) -> None:
    text = " ".join(page.read_text().split())  # type: ignore[attr-defined]
    rows = page.read_text().splitlines()  # type: ignore[attr-defined]
    for found in ORDER.finditer(text):
        a, b, points = (float(found[key]) for key in ("a", "b", "points"))
        assert points == pytest.approx(abs(a - b), abs=0.051) and (a > b) == (found["way"] == "above"), found.group()
        for name, number in ((found["one"].strip(), found["a"]), (found["other"], found["b"])):
            assert any(row.startswith(f"| {name} |") and number in row for row in rows), found.group()


def test_the_pattern_of_orders_finds_the_one_that_is_written() -> None:
    texts = [" ".join(page.read_text().split()) for page in PAGES]
    assert sum(len(ORDER.findall(text)) for text in texts) >= 1


def test_the_readme_counts_each_measured_order_once(index: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(name: str, high: float, low: float, seeds: str = "0, 1") -> object:
        return index.Measured(name, ("a", "b"), index.Number(high, 1.0, seeds), index.Number(low, 1.0, seeds), "pacs.md", "s")

    a_paper, another = [order("x > y", 50, 40), order("y > z", 40, 50)], [order("x > y", 50, 40), order("z > x", 40.5, 40)]
    another += [order("y > x", 40, 50, "0"), order("x > z", 50, 40, "0")]
    monkeypatch.setattr(index, "measured", lambda: {"fedwon/table-1": a_paper, "fedbn/table-1": another})
    row = index.summary_table("docs/results").splitlines()[-1]
    assert row.startswith("| [PACS, 20 rounds") and row.endswith("(docs/results/pacs.md) | 1 | 1 | 1 | 2 |")
