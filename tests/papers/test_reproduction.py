"""Reproduce a tiny experiment: trained, reused, changed, stopped and resumed; tables, pages and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.command_line import Command, says
from polyfed.errors import SettingError
from polyfed.papers import files
from polyfed.papers.files import item_from
from polyfed.papers.grid import Form, PlannedRun, cells_of, planned_runs
from polyfed.papers.page import Footnotes, problem_sentences, shown_tables, write_page
from polyfed.papers.reproduction import FAILED, NO_DATA, Outcome, Reproduction, data_problems, reproduce_item
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.settings import Settings

TINY = """\
title = "A tiny comparison"
paper = "Tiny"
item = "Figure 1"
claim = "FedBN is above FedAvg."
orders = ["seen, avg: FedBN > FedAvg", "other data, a: FedAvg > FedBN"]
measure = "accuracy, percent"
figure = "curves"
seeds = 2

[settings]
data = "digits-mini(per_domain=40)"
rounds = 3
evaluate_every = 1
batch_size = 16

[reduced]
seeds = 1
rounds = 1

[methods]
FedAvg = { method = "fedavg" }
FedBN = { method = "fedbn", lr = 0.1 }

[[part]]
name = "seen"
columns = ["pen", { name = "avg", read = "mean" }]
differs = { pen = "its own pen digits" }
rows = { FedAvg = "50.0±1.0 40.0", FedBN = "≈60.0 n/a" }

[[part]]
name = "unseen"
columns = [{ name = "S", read = "unseen", unseen = ["street"] }, { name = "P", read = "unseen", unseen = ["pen"] }, { name = "avg", mean = ["S", "P"] }]
reduced = { columns = ["S"] }
rows = { FedAvg = "1.0 2.0 -", FedBN = { published = "1.5 2.5 2.0", missing = "patience" } }

[[part]]
name = "other data"
settings = { data = "pacs(size=32)" }
columns = ["a"]
rows = { FedAvg = "1", FedBN = "2", Wrong = { method = "fedbn", model = "hfedf_cnn", data = "digits-mini(per_domain=40)", published = "3" } }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture(scope="module")
def found(folder: Path) -> Reproduction:
    return reproduce_item(item_from("tiny/figure-1", TINY), Form("reduced"), out=folder)


def test_cells_have_our_number_and_the_published_one(found: Reproduction) -> None:
    cells = {(one.cell.part.name, one.cell.row.name, one.cell.column.name): one for one in found.outcomes}
    one = cells["seen", "FedAvg", "pen"]
    assert one.mean is not None and 0 <= one.mean <= 100 and list(one.values) == [0]
    assert one.difference == pytest.approx(one.mean - 50.0)
    assert one.notes == ("its own pen digits", "reduced: rounds 1 (paper: 3)", "1 seed (paper: 2)")
    assert cells["seen", "FedBN", "avg"].difference is None and cells["seen", "FedBN", "avg"].mean is not None
    states = {key: cell.state for key, cell in cells.items() if cell.state}
    assert states["unseen", "FedBN", "S"] == "not yet"
    assert states["unseen", "FedAvg", "P"] == "not in the reduced form" and states["unseen", "FedAvg", "avg"] == "-"
    assert states["other data", "FedAvg", "a"] == NO_DATA and states["other data", "Wrong", "a"] == FAILED
    assert ("unseen", "FedAvg", "S") not in states


def test_only_selected_columns_and_parts_are_run_and_shown() -> None:
    item = item_from("tiny/figure-1", TINY)
    form = Form(only=("FedAvg",), columns=("S",))
    selected = {cell.column.name for cell in cells_of(item, form) if not cell.why_not}
    assert selected == {"S"} and [run.settings.unseen for run in planned_runs(cells_of(item, form), form).values()] == [("street",)]
    selected = {(cell.part.name, cell.column.name) for cell in cells_of(item, Form(columns=("seen",))) if not cell.why_not}
    assert selected == {("seen", "pen"), ("seen", "avg")}
    form = Form(columns=("unseen",))
    found = Reproduction(item, form, [Outcome(cell, {}, cell.why_not) for cell in cells_of(item, form)], {})
    assert [table.name for table in shown_tables(found, Footnotes())] == ["unseen"]


def test_a_setting_of_the_user_is_not_marked_as_reduced() -> None:
    cells = cells_of(item_from("tiny/figure-1", TINY), Form("reduced", changes={"rounds": 2}))
    (found,) = {note for cell in cells for note in cell.notes if "rounds" in note}
    assert found == "changed by the user: rounds 2 (paper: 3)"


def test_a_mean_is_that_of_its_columns_and_shares_their_runs() -> None:
    item = item_from("tiny/table-1", TINY.replace('FedAvg = "1.0 2.0 -"', 'FedAvg = "1.0 2.0 1.5"'))
    form = Form(seeds=1)
    cells = [cell for cell in cells_of(item, form) if cell.part.name == "unseen" and cell.row.name == "FedAvg"]
    assert [cell.column.name for cell in cells] == ["S", "P", "avg"] and cells[2].settings is None
    assert len(planned_runs(cells, form)) == len(planned_runs(cells[2:], form)) == 2


class Counting(Callback):
    def __init__(self) -> None:
        self.rounds = 0
        self.begun: list[tuple[int, int]] = []

    def begin(self, run: RunState) -> None:
        self.begun.append((run.number, run.total))

    def after_round(self, run: RunState) -> None:
        self.rounds += 1


def test_finished_runs_are_reused_and_stopped_ones_resumed(found: Reproduction, folder: Path) -> None:
    class Stop(Counting):
        def after_round(self, run: RunState) -> None:
            super().after_round(run)
            if self.rounds == 2:
                raise KeyboardInterrupt

    again = Counting()
    repeated = reproduce_item(found.item, Form("reduced"), out=folder, callbacks=[again])
    assert again.rounds == 0 and [one.values for one in repeated.outcomes] == [one.values for one in found.outcomes]
    assert [number for number, _ in again.begun] == list(range(1, len(again.begun) + 1))
    form = Form(only=("FedBN",), seeds=1)
    with pytest.raises(KeyboardInterrupt):
        reproduce_item(found.item, form, out=folder, callbacks=[Stop()])
    rest = Counting()
    finished = reproduce_item(found.item, form, out=folder, callbacks=[rest])
    whole = reproduce_item(found.item, form, out=folder / "elsewhere")
    assert 0 < rest.rounds <= 2
    assert [run.digest for runs in finished.trained.values() for run in runs] == [
        run.digest for runs in whole.trained.values() for run in runs
    ]


def test_the_page_does_not_name_the_folder_of_the_data() -> None:
    item, form = item_from("tiny/figure-1", TINY), Form(changes={"root": "/home/ann/data"})
    found = Reproduction(
        item, form, [], {}, problems={"a": "No pacs in /home/ann/data/pacs.", "b": "No pacs in /home/ann/data/pacs."}
    )
    assert problem_sentences(found) == ["a, b: No pacs in DATA/pacs."]


def test_the_page_shows_cells_runs_and_figures(found: Reproduction) -> None:
    page = write_page(found)
    text = page.read_text()
    assert page.name == "figure-1-reduced.md" and "Reduced form" in text
    assert "| FedAvg | 50.0 ± 1.0 / " in text and "≈60.0 / " in text and "n/a / " in text and "1 / no data" in text
    assert "polyfed reproduce tiny/figure-1 --form reduced --root DATA" in text
    for runs in found.trained.values():
        assert f"`{runs[0].digest[:16]}`" in text and runs[0].made_with["torch"] in text
    assert "other data, a: FedAvg > FedBN: not run" in text and "reduced form only (" in text
    drawn = sorted(page.parent.glob("figure-1-reduced-*.svg"))
    assert drawn and all(file.read_text().startswith("<svg xmlns=") and f"]({file.name})" in text for file in drawn)
    html = page.with_suffix(".html").read_text()
    assert html.count("<svg") >= len(drawn) and "<script" not in html and "50.0 ± 1.0 / " in html


def test_the_command(polyfed: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    (tmp_path / "shipped" / "tiny").mkdir(parents=True)
    (tmp_path / "shipped" / "tiny" / "figure-1.toml").write_text(TINY)
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    files.read_item.cache_clear()
    try:
        ended = polyfed("reproduce", "tiny/figure-1", "--form", "reduced", "--only", "fedbn", "--out", "done", "--json")
        assert ended.code == 0 and "no data" in ended.out and "failed" in ended.out
        assert "a) its own pen digits." in ended.out, "marks in the table are explained without --explain"
        cells = ended.json["cells"]
        assert {cell["state"] for cell in cells} >= {"measured", "no data", "not asked for", "not yet"}
        assert Path(ended.json["page"]) == Path("done/tiny/figure-1-reduced.md") and Path(ended.json["page"]).is_file()
        (row,) = polyfed("ls", "experiments", "--json").json["items"]
        assert (row["name"], row["state"], row["data_here"]) == ("tiny/figure-1", "in part", ["digits-mini"])
        assert "1 of 2" in polyfed("ls", "experiments").out and "1 of 2" in polyfed("show", "tiny/figure-1").out
        estimated = polyfed("reproduce", "--all", "--estimate", "--form", "reduced", "--json")
        assert estimated.code == 0 and len(estimated.json["experiments"]) == 1
        measured = polyfed("reproduce", "tiny/figure-1", "--form", "reduced", "--only", "FedAvg", "--estimate", "--json").json[
            "runs"
        ]
        assert {run["how"].split(";")[0] for run in measured} == {"measured", "network speed"}
        says(polyfed("reproduce", "tiny/figure-2"), "no experiment 'tiny/figure-2'", "Did you mean tiny/figure-1?")
        says(polyfed("reproduce", "tiny/figure-1", "--only", "FedBM"), "no method 'FedBM'", "FedBN")
        says(polyfed("reproduce", "tiny/figure-1", "--column", "pan"), "no column 'pan'", "pen")
        says(polyfed("reproduce", "--all"), "--all requires --estimate")
        says(polyfed("reproduce"), "EXPERIMENT is missing")
    finally:
        files.read_item.cache_clear()


def test_errors_in_experiment_files_name_the_place() -> None:
    for old, new, words in (
        ('"50.0±1.0 40.0"', '"50.0"', "1 published cells for 2 columns"),
        ('"50.0±1.0 40.0"', '"50.0±1.0 4o.0"', "'4o.0'"),
        ("rounds = 3", "ronds = 3", "'ronds'"),
        ('claim = "', 'clam = "', "'clam'"),
    ):
        with pytest.raises(SettingError, match=words):
            item_from("tiny/figure-1", TINY.replace(old, new, 1))


def test_json_holds_every_cell(found: Reproduction) -> None:
    assert len(json.loads(json.dumps(found.as_json()))["cells"]) == len(found.outcomes) == 4 + 6 + 3


LOOKED_INTO = """\
title = "Looked into"
paper = "Tiny"
item = "Figure 2"
claim = "FedBN's models differ more."
orders = ["models, apart: FedBN > FedAvg"]
measure = "deviation over clients"
figure = "analysis"
seeds = 2

[settings]
data = "digits-five"
rounds = 2
batch_size = 20

[reduced]
data = "digits-mini(per_domain=40)"
rounds = 1

[methods]
FedAvg = { method = "fedavg" }
FedBN = { method = "fedbn" }

[[part]]
name = "models"
analysis = { kind = "model-spread", figures = ["spread"] }
unit = "number"
columns = [{ name = "apart", number = "as tested" }]
rows = { FedAvg = "n/a", FedBN = "0.5" }

[[part]]
name = "scores"
columns = [{ name = "accuracy", read = "mean" }, { name = "gain", read = "mean", minus = "FedAvg" }]
rows = { FedAvg = "50.0 -", FedBN = "60.0 10.0" }

[[part]]
name = "both"
columns = [{ name = "mean", mean = ["scores, accuracy"] }]
rows = { FedBN = "60.0" }
"""


@pytest.fixture(scope="module")
def looked_into(folder: Path) -> Reproduction:
    return reproduce_item(item_from("tiny/figure-2", LOOKED_INTO), Form("reduced", seeds=2), out=folder)


def test_an_analysis_fills_cells_and_pictures(looked_into: Reproduction) -> None:
    cells = {(one.cell.part.name, one.cell.row.name): one for one in looked_into.outcomes if one.cell.column.name == "apart"}
    assert cells["models", "FedAvg"].values == {0: 0.0, 1: 0.0}, "all clients of FedAvg have the server's model"
    deviations = cells["models", "FedBN"].values
    rows = [row for row in looked_into.analyses["models"].found.tables["spread"] if row["run"] == "FedBN, seed 1"]  # type: ignore[union-attr]
    tested = [row["deviation"] for row in rows if row["models"] == "as tested"]
    assert deviations[1] == pytest.approx(sum(tested) / len(tested), rel=1e-3) and deviations[0] > 0
    page = write_page(looked_into)
    text, html = page.read_text(), page.with_suffix(".html").read_text()
    (drawn,) = page.parent.glob("figure-2-reduced-*.png")
    assert drawn.read_bytes().startswith(b"\x89PNG") and f"]({drawn.name})" in text
    assert 'src="data:image/png;base64,' in html and "img-src data:" in html
    assert "Differences between client models. " in text and "models, apart: FedBN > FedAvg: " in text
    assert looked_into.as_json()["analyses"][0]["kind"] == "model-spread"


def test_a_gain_is_the_difference_of_two_rows_and_a_mean_may_be_of_another_part(looked_into: Reproduction) -> None:
    cells = {(one.cell.part.name, one.cell.row.name, one.cell.column.name): one for one in looked_into.outcomes}
    ours, theirs, gain = (
        cells["scores", *place].values for place in (("FedBN", "accuracy"), ("FedAvg", "accuracy"), ("FedBN", "gain"))
    )
    assert gain == {seed: pytest.approx(ours[seed] - theirs[seed]) for seed in (0, 1)}
    assert cells["both", "FedBN", "mean"].values == ours


def test_numbers_of_data_that_stand_in_have_no_difference_to_the_published_ones(looked_into: Reproduction) -> None:
    one = next(one for one in looked_into.outcomes if one.cell.part.name == "scores" and one.cell.row.name == "FedAvg")
    assert one.mean is not None and one.difference is None
    assert "data digits-mini(per_domain=40) (paper: digits-five)" in one.notes[0]


def test_a_domain_or_a_partition_that_the_files_cannot_give_is_no_data() -> None:
    data = "digits-mini(per_domain=40)"
    runs = {
        "absent": PlannedRun(Settings(data=data, unseen=("nowhere",)), 1, ""),
        "too many": PlannedRun(Settings(data=data, partition="domain_split(clients=2, domains_per_client=6)"), 1, ""),
        "here": PlannedRun(Settings(data=data, unseen=("pen",)), 1, ""),
    }
    found = data_problems(runs)
    assert set(found) == {"absent", "too many"} and "no domain 'nowhere'" in found["absent"]
