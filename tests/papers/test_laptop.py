"""The laptop form: all experiments have one, its runs take about half a core-hour, and it contains the cells of the claim."""

from __future__ import annotations

import functools

import pytest

from polyfed.papers.claims import orders_of
from polyfed.papers.costs import core_hours, core_seconds, max_core_hours
from polyfed.papers.files import item_names, read_item
from polyfed.papers.grid import Cell, Form, cells_of, planned_runs, sources_of
from polyfed.settings import Settings

LAPTOP = Form("laptop")
MINUTES = 35
LONGER = {"fixbn/table-5": 55}
"""Core-minutes per run; Table 5 tests FixBN's main claim."""
TWO_SEEDS = ("gperxan/", "hfedf/table-11")


def by_place(name: str) -> dict[tuple[str, str, str], Cell]:
    item = read_item(name)
    places = [(part.name, row.name, column.name) for part in item.parts for row in part.rows for column in part.columns]
    return dict(zip(places, cells_of(item, LAPTOP), strict=True))


@functools.cache
def full_settings(name: str) -> dict[tuple[str, str, str, str], Settings | None]:
    return {each.key: each.settings for each in cells_of(read_item(name), Form())}


def test_every_experiment_has_a_laptop_form_that_fits_half_a_core_hour() -> None:
    for name in item_names():
        item = read_item(name)
        assert "laptop" in item.forms or all("laptop" in part.forms for part in item.parts), name
        runs = planned_runs(cells_of(item, LAPTOP), LAPTOP)
        assert runs, name
        for run in runs.values():
            seconds = core_seconds(run.settings)
            assert seconds is not None and seconds / 60 <= LONGER.get(name, MINUTES), (run.words, run.settings)


def test_the_laptop_form_has_three_seeds_and_the_cells_that_the_claim_names() -> None:
    for name in item_names():
        cells = by_place(name)
        for cell in cells.values():
            if cell.settings is not None and not cell.why_not:
                assert cell.seeds == (2 if cell.item.name.startswith(TWO_SEEDS) else 3), cell.key
        for order in orders_of(read_item(name)):
            for row in (order.high, order.low):
                cell = cells[order.part, row, order.column]
                assert not cell.why_not and sources_of(cell, LAPTOP), (order.text, row, cell.why_not)


def test_every_cell_of_the_laptop_form_says_what_differs_from_the_full_one() -> None:
    for name in item_names():
        for cell in by_place(name).values():
            if cell.settings is not None and not cell.why_not and cell.settings != full_settings(cell.item.name)[cell.key]:
                assert any(note.startswith("laptop: ") and "(paper: " in note for note in cell.notes), (cell.key, cell.notes)


def test_what_the_evidence_queue_runs_is_as_agreed() -> None:
    fixbn = by_place("fixbn/table-5")
    kept = {row: cell.settings for (_, row, _), cell in fixbn.items() if not cell.why_not}
    assert set(kept) == {"BN", "GN", "Fixup", "FixBN"}
    for settings in kept.values():
        assert isinstance(settings, Settings) and (settings.data, settings.total_epochs) == ("cifar10(per_domain=10000)", 64.0)
        assert (settings.local_steps, settings.model, settings.schedule) == (100, "resnet20", "steps(at=(0.5, 0.75), factor=0.1)")
    pacs = {place: cell for place, cell in by_place("gperxan/table-2").items() if place[0] == "PACS" and not cell.why_not}
    assert {row for _, row, _ in pacs} == {"FedAvg", "FedDG-GA", "FedBN", "gPerXAN"}
    assert {column for *_, column in pacs} == {"P", "A", "C", "S", "avg"}
    for cell in pacs.values():
        for source in sources_of(cell, LAPTOP):
            assert source.settings is not None and source.settings.model == "efficientnet_lite0(pretrained=True)"
            assert "size=96" in source.settings.data and 10 * 60 <= (core_seconds(source.settings) or 0) <= 12 * 60


def test_the_estimate_of_all_experiments_counts_the_most_expensive_run() -> None:
    item = read_item("fixbn/table-5")
    runs = planned_runs(cells_of(item, LAPTOP), LAPTOP).values()
    most, whole = max_core_hours(runs), core_hours(runs)
    assert most is not None and whole == pytest.approx(12 * most) and max_core_hours([]) is None


def test_precision_layout_parts_and_last_rounds_are_counted() -> None:
    office = {"data": 'office-caltech10(size=128, protocol="fedbn")', "model": "alexnet_fedwon", "rounds": 300}

    def seconds(**settings: object) -> float:
        found = core_seconds(Settings(**settings))  # type: ignore[arg-type]
        assert found is not None
        return found

    assert seconds(**office, amp="bfloat16") == pytest.approx(0.53 * seconds(**office))
    digits = {"data": "digits-five(per_domain=7438)", "rounds": 10}
    tenth, whole = (seconds(**digits, partition=f"domain_parts(parts={parts}, out_of=10)") for parts in (1, 10))
    assert 6 < whole / tenth < 10
    assert seconds(**digits, selection="mean_last(10)") > seconds(**digits)
    hospital = {"unseen": ("hospital 1",), "rounds": 1, "local_steps": 1}
    tested, all_of_it = (seconds(data="camelyon17", **hospital, unseen_part=part) for part in ("test", "all"))
    assert 4 < all_of_it / tested < 6
