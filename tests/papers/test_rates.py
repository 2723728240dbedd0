"""Sources of learning rates: the paper, or the log of a search on validation data without test scores."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS, DOCS
from helpers.scripts import loaded
from polyfed.errors import SettingError
from polyfed.papers import files
from polyfed.papers.files import OPEN, PAPER, item_from, item_names, read_item
from polyfed.papers.grid import Form, cells_of, sources_of
from polyfed.setting_facts import Unset

search = loaded(BENCHMARKS / "choose_rate.py")
OPEN_ROWS = {
    "fedstein/table-1": {"FedStein"},
    "fedstein/table-3": {"FedStein"},
    "fedwon/table-12": {"FedAvg w/o BN"},
    "fedwon/table-15": {"FedAvg", "FedAvg+GN", "FedAvg+LN", "SiloBN", "FixBN", "FedBN", "FedWon"},
    "fedwon/table-17": {"PartialFed-Fix", "PartialFed-Adaptive"},
    "fedwon/figure-3": {"SingleSet w/o BN", "FedAvg w/o BN"},
    "fedwon/figure-5": {"FedAvg w/o BN"},
    "fedwon/figure-6": {"FedAvg", "FedAvg+GN", "FedAvg+LN", "FixBN", "FedWon"},
    "fedwon/figure-13": {"FedAvg w/o BN"},
    "fixbn/table-3": {"GN", "BN", "FixBN"},
    "hfedf/figure-14": {"ResNet-18", "MobileNetV2"},
}
"""Rates that the papers do not print. A row leaves this list when its rate is chosen on validation data."""


def test_experiments_do_not_depend_on_defaults_that_data_sets_declare() -> None:
    for name in item_names():
        for cell in cells_of(read_item(name), Form(planned=True)):
            for source in [] if cell.why_not else sources_of(cell, Form(planned=True)):
                assert source.settings is not None
                unset = [each for each in ("lr", "batch_size") if isinstance(getattr(source.settings, each), Unset)]
                assert not unset, (name, source.row.name, unset)


def test_every_row_that_runs_says_where_its_rate_comes_from() -> None:
    for name in item_names():
        still_open = set()
        for cell in cells_of(read_item(name), Form(planned=True)):
            for source in [] if cell.why_not else sources_of(cell, Form(planned=True)):
                kind, _, why = source.row.chosen.partition(":")
                if kind == OPEN:
                    assert why.strip(), (source.key, "an open rate needs a reason")
                    assert any(
                        note.startswith("learning rate not printed; not yet chosen on validation data") for note in source.notes
                    )
                    still_open.add(cell.row.name)
                elif kind != PAPER:
                    log = json.loads((DOCS / "results" / source.row.chosen).read_text())
                    assert not search.log_problems(log), source.key
                    assert source.settings is not None and source.settings.lr == log["chosen"], source.key
        assert still_open == OPEN_ROWS.get(name, set()), name


def test_a_search_on_digits_mini_writes_a_log_without_test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped" / "tiny"
    shipped.mkdir(parents=True)
    (shipped / "table-1.toml").write_text(TINY)
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    read_item.cache_clear()
    words = [
        "tiny/table-1",
        "--row",
        "FedBN",
        "--lr",
        "0.001,0.05",
        "--out",
        str(tmp_path / "runs"),
        "--log",
        str(tmp_path / "log.json"),
    ]
    try:
        search.main(words)
        log = json.loads((tmp_path / "log.json").read_text())
        before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("metrics.jsonl")}
        search.main(words)
        assert json.loads((tmp_path / "log.json").read_text())["validation"] == log["validation"]
        assert {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("metrics.jsonl")} == before, "trials are reused"
        with pytest.raises(SettingError, match="no row 'FedBM'"):
            search.main([*words[:2], "FedBM", *words[3:]])
    finally:
        read_item.cache_clear()
    assert search.log_problems(log) == [] and log["chosen"] == 0.05 and set(log["validation"]) == {"0.001", "0.05"}
    assert (log["seed"], log["rounds"], log["row"]) == (0, 4, "FedBN") and str(tmp_path) not in json.dumps(log)
    lines = [json.loads(line) for file in before for line in file.read_text().splitlines()]
    assert "validation" in {line["view"] for line in lines} and not {"seen", "unseen"} & {line["view"] for line in lines}
    late = [line["accuracy"] for line in lines if line["view"] == "validation" and line["round"] > 2]
    assert statistics.fmean(late) == pytest.approx(statistics.fmean(log["validation"].values())), "the mean of the last two rounds"


TINY = """# polyfed reproduce tiny/table-1
title = "t"
paper = "Tiny"
item = "Table 1"
claim = "c."
measure = "m."
seeds = 1
chosen = "paper"
[settings]
data = "digits-mini(per_domain=60)"
rounds = 4
selection = "mean_last(2)"
[methods]
FedAvg = { method = "fedavg" }
FedBN = { method = "fedbn", chosen = "open: searched" }
[[part]]
columns = [{ name = "avg", read = "mean" }]
rows = { FedAvg = "n/a", FedBN = "n/a", "FedBN again" = { like = "FedBN", chosen = "rates/none.json", published = "n/a" } }
"""

LOG = dict.fromkeys(search.KEYS, "") | {
    "grid": [0.01, 0.1, 1.0],
    "validation": {"0.01": 0.5, "0.1": 0.7},
    "failed": {"1": "the loss is not finite"},
    "chosen": 0.1,
}


def test_a_row_a_method_a_part_and_a_file_may_say_it_and_the_nearest_wins() -> None:
    fedavg, fedbn, again = item_from("tiny/table-1", TINY).parts[0].rows
    assert (fedavg.chosen, fedbn.chosen, again.chosen) == ("paper", "open: searched", "rates/none.json")
    notes = [cell.notes[0] if cell.notes else "" for cell in cells_of(item_from("tiny/table-1", TINY), Form())]
    assert notes[1] == "learning rate not printed; not yet chosen on validation data: 0.05 (searched)"
    assert notes[2] == "learning rate not printed; 0.05 was chosen on validation data (rates/none.json)"
    assert "mean of the last 2 rounds" in notes[0]


def test_a_log_has_candidate_rates_with_validation_scores_and_nothing_else() -> None:
    assert search.log_problems(LOG) == []
    for change, problem in (
        ({"test": {"0.1": 0.9}}, "'test' does not belong"),
        ({"accuracy": 0.9}, "'accuracy' does not belong"),
        ({"chosen": 0.01}, "does not have the best validation score"),
        ({"validation": {"0.1": 0.7}}, "two or more rates"),
        ({"validation": {"0.01": float("nan"), "0.1": 0.7}}, "finite"),
        ({"grid": [0.1], "validation": {"0.1": 0.7}, "failed": {}}, "two or more rates"),
    ):
        assert any(problem in each for each in search.log_problems({**LOG, **change})), problem
    assert any(
        "'grid' is missing" in each for each in search.log_problems({key: value for key, value in LOG.items() if key != "grid"})
    )
