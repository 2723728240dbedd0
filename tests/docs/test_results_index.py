"""Results pages: generated from the ledger alone, statuses by one rule, and statements on hand-written pages true of their tables."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.records import made_record
from helpers.scripts import loaded
from polyfed.papers.claims import STATUSES
from polyfed.papers.files import item_from, item_names, read_item
from polyfed.papers.ledger import Ledger, write_record

RESULTS = ROOT / "docs" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
CHECKED = re.compile(r"<!-- checked: (?P<heading>.+?) / (?P<column>(?:unseen: )?[^:]+): (?P<statements>.+?) -->")
CELL = re.compile(r"\**(?P<value>\d+(?:\.\d+)?)(?: ± \d+(?:\.\d+)?)?\**(?: \([\d.]+\))?")
ORDER_WORDS = re.compile(
    r"\b(above|below|best|worst|highest|lowest|first|second|leads?|level|behind|ahead|gains?|loses?|helps|hurts)\b"
)
TINY = """\
title = "A tiny comparison"
paper = "Tiny"
item = "Table 1"
claim = "FedBN is above FedAvg."
orders = ["avg: FedBN > FedAvg", "a: FedBN > Local"]
measure = "accuracy, percent"
seeds = 3

[settings]
data = "digits-mini"
rounds = 3

[laptop]
rounds = 2

[reduced]
rounds = 1

[[part]]
columns = ["a", "b", { name = "avg", read = "mean" }]
[part.rows]
FedAvg = { method = "fedavg", published = "50.0 40.0 45.0" }
FedBN = { method = "fedbn", published = "60.0 50.0 55.0" }
Local = { method = "local", published = "40.0 30.0 35.0" }
"""


@pytest.fixture(scope="module")
def index() -> ModuleType:
    return loaded(ROOT / "docs" / "results_index.py")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return loaded(ROOT / "docs" / "results_pages.py")


def test_every_experiment_has_one_row_with_a_status_alone_in_the_third_column() -> None:
    lines = (RESULTS / "index.md").read_text().splitlines()
    rows = [
        re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |"))
        for line in lines
        if re.match(r"\| [a-z]+/(table|figure)-", line)
    ]
    assert [row[0] for row in rows] == item_names() and len(rows) == 83
    assert all(row[1] == read_item(row[0]).claim and row[2] in STATUSES and len(row) == 6 for row in rows)


def test_hfedf_is_not_comparable_and_says_why() -> None:
    row = next(line for line in (RESULTS / "index.md").read_text().splitlines() if line.startswith("| hfedf/table-11 |"))
    known = Ledger.read(RESULTS / "runs")
    if not any(record.method.startswith("hfedf") for record in known.records):
        assert "| not comparable |" in row and "DomainBed" in row and "35.1 after 30 rounds" in row


def answer(index: ModuleType, *records: object, reason: str = "") -> object:
    return index.answer(item_from("tiny/table-1", TINY), Ledger(records), reason)


def test_an_answer_takes_the_largest_form_and_the_least_favourable_order(index: ModuleType) -> None:
    three = {0: 0.5, 1: 0.52, 2: 0.51}
    full = [made_record("fedavg", seed, three[seed], rounds=3) for seed in three]
    full += [made_record("fedbn", seed, three[seed] + 0.10 + seed / 1000, rounds=3) for seed in three]
    local = [made_record("local", seed, score, rounds=3) for seed, score in ((0, 0.7), (1, 0.63), (2, 0.64))]
    nothing = answer(index)
    assert (nothing.status, nothing.seeds, nothing.form, nothing.tests()) == ("not run", "", "", "")
    assert answer(index, reason="other data").status == "not comparable"
    found = answer(index, *full)
    # Differences of 10.0, 10.1 and 10.2 points: t = 10.1 / (0.1 / sqrt(3)) = 174.9 with two degrees of freedom, p = 1 - t / sqrt(2 + t²).
    assert (found.status, found.seeds, found.form) == ("confirmed", "0, 1, 2", "full") and "p = 3e-05" in found.tests()
    assert "1 of 2 rankings not run" in found.tests() and found.published() == "avg: FedBN > FedAvg: 55 and 45"
    assert answer(index, *full, *local).status == "cannot be distinguished", "differences 10.0, 0.9 and 2.8: p = 0.24"
    one = answer(index, full[0], full[3])
    assert one.status == "one seed only" and one.row()[2] == "one seed only"
    laptop = [
        made_record(method, seed, three[seed] + (method == "fedbn") * (0.1 + seed / 1000), rounds=2)
        for method in ("fedavg", "fedbn")
        for seed in three
    ]
    assert (answer(index, *laptop).status, answer(index, *laptop).form) == ("confirmed", "laptop")
    assert answer(index, *laptop, *full).form == "full"
    reduced = [made_record(method, 0, 0.5, rounds=1) for method in ("fedavg", "fedbn")]
    assert (answer(index, *reduced).status, answer(index, *reduced).form) == ("reduced form only", "reduced")


def test_pages_are_the_same_each_time_and_need_only_the_ledger(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    item = item_from("tiny/table-1", TINY)
    monkeypatch.setattr(pages, "item_names", lambda: ["tiny/table-1"])
    monkeypatch.setattr(pages, "read_item", lambda name: item)
    explanations = pages.Explanations({"tiny/table-1": {"": {"FedAvg": {"a": "too few images."}}}})
    records = [made_record("fedavg", seed, 0.6 + seed / 100, rounds=3) for seed in (0, 1)]
    records += [made_record("fedbn", 0, 0.6, rounds=3), made_record("fedavg", 0, 0.4, rounds=7)]
    files = pages.pages(Ledger(records), explanations)
    assert files == pages.pages(Ledger(list(reversed(records))), explanations)
    assert set(files) == {"digits-mini.md", "pictures/tiny-table-1-1.svg"}
    text = files["digits-mini.md"].decode()
    # 60 and 61: the mean is 60.5, the deviation sqrt(0.5) = 0.707.
    assert "| FedAvg | 50.0 / 60.5 ± 0.7 (+10.5)" in text and "| Local |" not in text
    assert "* FedAvg, a (+10.5): too few images." in text and "FedAvg, b (+20.5), avg (+15.5): unexplained" in text
    assert "FedBN, b (+10.0), avg (+5.0): unexplained" in text and "FedBN, a" not in text, "60 is the published number"
    assert "avg: FedBN > FedAvg: one seed only (60.0 and 60.5 ± 0.7" in text
    assert "## Further runs" in text and "--rounds 7" in text and text.count("](runs/") == 4
    drawn = files["pictures/tiny-table-1-1.svg"].decode()
    assert drawn.startswith("<svg xmlns=") and drawn.count('class="band') == 1, "one row has two seeds"


def test_published_pages_are_those_of_the_ledger(tmp_path: Path) -> None:
    publish = loaded(ROOT / "docs" / "results" / "publish.py")
    assert publish.publish(RESULTS, check=True) == []
    (tmp_path / "explanations.toml").write_text("")
    write_record(tmp_path / "runs", made_record("fedavg", 0, 0.5))
    (tmp_path / "by-hand.md").write_text("# By hand\n")
    assert [path.name for path in publish.publish(tmp_path, check=True)] == ["digits-mini.md"]
    publish.publish(tmp_path, check=False)
    assert publish.publish(tmp_path, check=True) == []
    (tmp_path / "pacs.md").write_text(publish.MARK)
    assert publish.publish(tmp_path, check=False) == [tmp_path / "pacs.md"]
    assert (tmp_path / "by-hand.md").exists() and not (tmp_path / "pacs.md").exists()


def test_explanations_name_cells_that_exist() -> None:
    document = tomllib.loads((RESULTS / "explanations.toml").read_text())
    assert set(document["not_comparable"]) <= set(item_names())
    for name, parts in document["cells"].items():
        known = {part.name: part for part in read_item(name).parts}
        for part, rows in parts.items():
            assert set(rows) <= {row.name for row in known[part].rows}
            assert all(set(cells) <= {"all", *(column.name for column in known[part].columns)} for cells in rows.values())


def test_records_of_the_repository_are_small_whole_and_name_no_folder_of_a_machine() -> None:
    paths = sorted((RESULTS / "runs").glob("*.json"))
    known = Ledger.read(RESULTS / "runs")
    assert len(known.records) == len(paths) >= 4
    for path in paths:
        text = path.read_text()
        assert len(text) < 100_000 and not re.search(r"/(work|home|tmp|root|Users)/", text)
        document = json.loads(text)
        assert "--root DATA" in document["command"] and not {"seen", "unseen"} & set(document.get("validation", {}))


def test_shared_results_were_taken_as_they_are() -> None:
    known = Ledger.read(RESULTS / "runs")
    found = {
        (record.method.split("(")[0], record.seed): record
        for record in known.records
        if record.commit == "3241a162d5fed1c027250766da2b4630b5a06346"
    }
    means = {key: sum(one["accuracy"] for one in record.scores) / 4 for key, record in found.items()}
    assert {key: round(100 * mean, 1) for key, mean in means.items()} == {
        ("fedbn", 0): 71.2,
        ("fedbn", 1): 71.8,
        ("fedwon", 0): 73.3,
        ("fedwon", 1): 67.9,
    }
    assert [record.selected_round for key, record in sorted(found.items()) if key[0] == "fedwon"] == [298, 299]


# ------------------------------------------------------------------------------------------------------ hand-written pages
def page_table(page: Path, heading: str) -> dict[str, dict[str, str]]:
    """The first table under a heading of a page: rows by their first cell, cells by the head."""
    section = page.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[2:]:
        if len(line) != len(lines[0]) or line[0] in rows:
            break
        rows[line[0]] = dict(zip(lines[0], line, strict=True))
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_orders_in_words_are_those_of_the_tables(page: Path) -> None:
    """A comment after a claim says it in a form that can be checked: HEADING / COLUMN: A > B by 1.5; C < others but D."""
    for found in CHECKED.finditer(page.read_text()):
        cells = {}
        for row, line in page_table(page, found["heading"]).items():
            value = CELL.fullmatch(line[found["column"]])
            if value is not None:
                cells[row] = float(value["value"])
        for statement in found["statements"].split("; "):
            assert is_true(statement, cells), f"{page.name}: {statement} ({found['heading']}, {found['column']})"


def is_true(statement: str, cells: Mapping[str, float]) -> bool:
    """Return True if a statement holds for the cells of a column. An unknown row is an error."""
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
        if ORDER_WORDS.search(bold):
            assert CHECKED.search(item), f"{page.name}: add a comment that can be checked after: {bold}"
