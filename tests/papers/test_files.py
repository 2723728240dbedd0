"""The 83 experiment files: their numbers are the papers', their claims match the numbers, and their settings are valid."""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from helpers.paths import ROOT
from polyfed.core.method import parse
from polyfed.errors import SettingError
from polyfed.papers.claims import published_orders
from polyfed.papers.costs import IN_PART, READY, experiment_rows, state_of
from polyfed.papers.figures import KINDS
from polyfed.papers.files import FORMS, SHIPPED, PaperItem, Published, item_from, item_names, read_cell, read_item
from polyfed.papers.grid import Form, canonical, cells_of, planned_runs, settings_of
from polyfed.settings import Settings
from polyfed.studies.analyse.kinds import KINDS as KINDS_OF_ANALYSES
from polyfed.studies.compare.recipes.checks import text_problems

ITEMS = {
    "fedwon": ("1 2 3 4 11 12 13 14 15 16 17 18 19 20 21 22", "1 3 4 5 6 10 11 12 13 14"),
    "fixbn": ("1 2 3 4 5 h i", "1 2 3 d e f g h i j k l m"),
    "hfedf": ("2 3 4 5 6 11 12 13 14 15 16 17 18 19", "3 4 5 6 7 8 9 10 11 12 13 14 15 16 17"),
    "fedstein": ("1 2 3", ""),
    "gperxan": ("2 3 4", "2 3"),
}
TYPED = Path(__file__).parent / "published.txt"
LOST = "lost"
Place = tuple[str, str, str, str]


def typed() -> dict[Place, str]:
    """Return the transcribed numbers by experiment, part, row and column (or its number)."""
    found: dict[Place, str] = {}
    name, part, by_column = "", "", list[str]()
    for line in TYPED.read_text().splitlines():
        if line.startswith("=="):
            words = [word.strip() for word in line.removeprefix("==").split(" : ")]
            name, part = words[0].removesuffix(":").strip(), words[1] if len(words) > 1 else ""
            by_column = words[3].split("; ") if len(words) > 3 else []
        elif ": " in line and not line.startswith("#"):
            label, _, cells = line.rpartition(": ")
            for number, cell in enumerate(cells.split()):
                found[(name, part, by_column[number], label) if by_column else (name, part, label, str(number))] = cell
    return found


TABLE = typed()


def in_files(name: str) -> dict[Place, tuple[Place, Published]]:
    """Return the numbers of an experiment file by column name and by column number."""
    found = {}
    for part in read_item(name).parts:
        for row in part.rows:
            for number, (column, cell) in enumerate(zip(part.columns, row.published, strict=True)):
                place = (name, part.name, row.name, column.name)
                found[place] = found[(name, part.name, row.name, str(number))] = (place, cell)
    return found


def test_all_items_of_the_five_papers_are_there() -> None:
    wanted = {
        f"{paper}/{kind}-{number}"
        for paper, both in ITEMS.items()
        for kind, numbers in zip(("table", "figure"), both, strict=True)
        for number in numbers.split()
    }
    assert set(item_names()) == wanted and len(wanted) == 83
    assert Counter(name.partition("/")[2].partition("-")[0] for name in wanted) == {"table": 43, "figure": 40}
    assert Counter(name.partition("/")[0] for name in wanted) == {
        "fedwon": 26,
        "fixbn": 20,
        "hfedf": 29,
        "fedstein": 3,
        "gperxan": 5,
    }


def test_a_file_says_what_it_is() -> None:
    for name in item_names():
        item = read_item(name)
        paper, _, rest = name.partition("/")
        assert item.paper.lower() == paper and item.item.lower().replace(" ", "-") == rest
        assert item.title and item.claim.endswith(".") and item.measure.endswith(".") and item.parts, name
        assert item.is_figure == bool(item.figure) and item.figure in ("", *KINDS), name
        assert (SHIPPED / f"{name}.toml").read_text().startswith(f"# polyfed reproduce {name}")
        assert "reduced" in item.forms, f"{name} has no reduced form"
        document = tomllib.loads((SHIPPED / f"{name}.toml").read_text())
        for part, written in zip(item.parts, document["part"], strict=True):
            names = [row.name for row in part.rows]
            columns = [column.name for column in part.columns]
            assert names and columns and len(set(columns)) == len(columns), (name, part.name)
            differs = written.get("differs", {})
            assert isinstance(differs, str) or set(differs) <= {"all", *names, *columns}, (part.name, differs)


def test_published_numbers_equal_the_separately_typed_ones() -> None:
    for name in sorted({place[0] for place in TABLE}):
        files = in_files(name)
        seen = set()
        for place, cell in TABLE.items():
            if place[0] != name:
                continue
            where, published = files[place]
            seen.add(where)
            if cell == LOST:
                assert published.recomputed or published.spread is None, (where, published)
            else:
                wanted = read_cell(cell)
                assert (published.value, published.spread, published.recomputed) == (wanted.value, wanted.spread, False), where
                assert published.exists == wanted.exists
        rest = {where: cell for where, cell in files.values() if where not in seen and cell.value is not None}
        assert not rest, f"not in {TYPED.name}: {rest}"


def test_figures_repeat_only_numbers_that_tables_have() -> None:
    for name in sorted(set(item_names()) - {place[0] for place in TABLE}):
        paper = name.partition("/")[0]
        known = known_numbers(paper)
        for where, cell in in_files(name).values():
            assert cell.value is None or cell.text.partition("±")[0].lstrip("≈") in known, (where, cell)


@functools.cache
def known_numbers(paper: str) -> set[str]:
    cells = [cell for place in TABLE if place[0].startswith(paper) for _, cell in in_files(place[0]).values()]
    recomputed = {cell.text.lstrip("≈").partition("±")[0] for cell in cells if cell.recomputed}
    return {cell.partition("±")[0] for place, cell in TABLE.items() if place[0].startswith(paper)} | recomputed


def test_recomputed_cells_follow_from_the_others() -> None:
    checked = 0
    for name in (f"hfedf/table-{number}" for number in range(11, 20)):
        for row in read_item(name).parts[0].rows:
            for five in (row.published[:5], row.published[5:]):
                if any(cell.recomputed for cell in five):
                    values = [cell.value or 0.0 for cell in five]
                    assert sum(values[:4]) / 4 == pytest.approx(values[4], abs=0.11), (name, row.name)
                    checked += 1
    assert checked == 3 + 12 + 3 + 1


def test_the_transcribed_numbers_are_in_the_specification() -> None:
    file = ROOT.parent / "shared" / "spec" / "experiments.md"
    if not file.is_file():
        pytest.skip("the specification is not available")
    lines = [re.findall(r"\d+(?:\.\d+)?", line) for line in file.read_text().splitlines()]
    text = TYPED.read_text().splitlines()
    for line in text:
        if ": " in line and not line.startswith(("#", "==")):
            numbers = [n for cell in line.rpartition(": ")[2].split() if cell[0].isdigit() for n in cell.split("±")]
            plain = [n for cell in line.rpartition(": ")[2].split() if cell[0].isdigit() for n in cell.split("±")[:1]]
            assert any(is_within(numbers, each) or is_within(plain, each) for each in lines), line


def is_within(numbers: list[str], line: list[str]) -> bool:
    rest = iter(line)
    return all(number in rest for number in numbers)


def test_rankings_in_claims_match_the_published_numbers() -> None:
    for name in item_names():
        for checked in published_orders(read_item(name)):
            assert checked.holds is not False, str(checked)
    assert sum(bool(read_item(name).orders) for name in item_names()) >= 55


def full_settings(item: PaperItem, part_name: str, row_name: str) -> Settings:
    part = next(part for part in item.parts if part.name == part_name)
    row = next(row for row in part.rows if row.name == row_name)
    return settings_of(item, part, row, part.columns[0], Form())


@pytest.mark.parametrize(
    ("name", "part", "row", "wanted"),
    [
        ("fedwon/table-1", "Digits-Five", "FedWon", {"method": "fedwon + agc(clip=0.64)", "lr": 0.05, "rounds": 100, "batch_size": 32}),
        ("fedwon/table-1", "Office-Caltech-10", "FedWon", {"method": "fedwon + agc(clip=1.28)", "lr": 0.1, "rounds": 300, "selection": "best_validation"}),
        ("fixbn/table-5", "", "FixBN", {"method": "fixbn", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "local_steps": 100, "total_epochs": 128.0, "batch_size": 20}),
        ("hfedf/table-11", "", "hFedF", {"lr": 1e-3, "weight_decay": 1e-3, "rounds": 200, "local_epochs": 2, "batch_size": 64, "data": 'pacs(size=32, augment="domainbed", normalise="imagenet")'}),
        ("fedstein/table-1", "Digits-Five", "FedStein", {"method": "fedstein", "rounds": 100, "batch_size": 32}),
        ("fedstein/table-2", "", "FedStein", {"method": "fedstein", "lr": 0.005, "rounds": 50, "batch_size": 64}),
        ("gperxan/table-2", "PACS", "gPerXAN", {"lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4, "rounds": 100, "schedule": "cosine", "batch_size": 32, "model": "resnet50(pretrained=True)"}),
    ],
)  # fmt: skip
def test_every_papers_own_method_is_run_at_its_papers_settings(name: str, part: str, row: str, wanted: dict[str, object]) -> None:
    settings = full_settings(read_item(name), part, row)
    assert {key: getattr(settings, key) for key in wanted} == wanted
    assert parse(settings.method).parts[0].name == read_item(name).paper.lower().replace("-", "_")


def test_hyperparameters_of_hfedf_are_those_of_its_table_10() -> None:
    method = parse(full_settings(read_item("hfedf/table-14"), "", "hFedF").method)
    assert "ema_alpha=0.75" in method.full_text and "server_weight_decay=1e-05" in method.full_text


def test_an_unknown_form_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"There is no form 'lapto'\. .*laptop"):
        Form("lapto")


FORMED = """
title = "t"
paper = "Tiny"
item = "Table 1"
claim = "c."
measure = "m."
seeds = 5
[laptop]
rounds = 4
[[part]]
like = "fedwon/figure-1"
[part.laptop]
seeds = 2
columns = ["client and client"]
"""


def test_a_laptop_table_of_a_file_or_a_part_changes_what_it_names() -> None:
    item = item_from("tiny/table-1", FORMED)
    one, other = cells_of(item, Form("laptop"))
    assert one.settings is not None and (one.settings.rounds, one.seeds) == (4, 2) and "laptop: rounds 4 (paper: 100)" in one.notes
    assert other.settings is None and other.why_not == "not in the laptop form"
    assert [cell.seeds for cell in cells_of(item, Form())] == [5, 5]


def test_every_setting_and_text_is_sound_without_data() -> None:
    checked = set()
    for name in item_names():
        item = read_item(name)
        for form in map(Form, FORMS):
            for part in item.parts:
                for row in part.rows:
                    for column in part.columns:
                        if not column.of and not column.mean and "method" in {**part.settings, **row.settings, **column.settings}:
                            canonical(settings_of(item, part, row, column, form).method)
            for run in planned_runs(cells_of(item, form), form).values():
                texts = tuple(
                    getattr(run.settings, key) for key in ("data", "model", "method", "partition", "loss", "backend", "load")
                )
                assert texts in checked or not (problems := text_problems(run.settings)), (name, run.settings, problems)
                checked.add(texts)


def test_the_reduced_form_is_smaller_and_has_runs_wherever_the_full_form_has() -> None:
    for name in item_names():
        item = read_item(name)
        full, reduced = (planned_runs(cells_of(item, form), form) for form in (Form(), Form("reduced")))
        assert bool(full) == bool(reduced), name
        assert sum(run.seeds for run in reduced.values()) <= sum(run.seeds for run in full.values()), name


def test_polyfed_can_run_all_cells() -> None:
    states = {name: state_of(read_item(name)) for name in item_names()}
    assert Counter(states.values()) == {READY: 76, IN_PART: 7}
    cells = [cell for name in item_names() for cell in cells_of(read_item(name), Form())]
    assert not [cell for cell in cells if cell.why_not.startswith("not yet")]


ANALYSED = [(name, part) for name in item_names() for part in read_item(name).parts if part.analysis is not None]


def test_analyses_exist_and_their_columns_read_their_numbers() -> None:
    for name, part in ANALYSED:
        assert part.analysis is not None and part.analysis.kind in KINDS_OF_ANALYSES and part.analysis.figures, name
        assert all(column.number for column in part.columns), f"{name}: a score under the name of an analysis would be mislabelled"
        assert read_item(name).figure, f"{name}: an analysis is a figure of the paper"


def test_only_analyses_have_numbers_and_rows_that_are_subtracted_exist() -> None:
    assert len({name for name, _ in ANALYSED}) == 11
    for name in item_names():
        for part in read_item(name).parts:
            for column in part.columns:
                assert not column.number or part.analysis is not None, (name, column)
                assert not column.minus or column.minus in {row.name for row in part.rows}, (name, column)


def test_the_list_has_83_rows_with_cost_data_and_state(tmp_path: Path) -> None:
    rows = experiment_rows(root=None, out=tmp_path)
    assert [row["name"] for row in rows] == item_names()
    for row in rows:
        assert row["data"] and row["runs"] > 0 and 0 < row["core_hours_reduced"] < row["core_hours_full"], row
        assert row["core_hours_reduced"] < 3, row
        assert bool(row["missing"]) == (row["state"] != READY) and not row["data_here"]
