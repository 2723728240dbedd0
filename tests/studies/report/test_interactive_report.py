"""The report in a browser: a legend entry is clicked, a table sorted, the measure switched; and leave-one-out is one comparison."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest

import polyfed
from helpers.browser import use_report
from helpers.command_line import Command
from helpers.report_page import words
from polyfed.studies.report import exports, gather, pictures
from polyfed.studies.report.html import render, write_report
from polyfed.studies.report.run_record import MEAN

METHODS = ["fedavg", "fedbn", "fedprox", "fedavg + group_norm"]
DATA = "digits-mini(per_domain=16)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leave-one-out comparison of four methods."""
    folder = tmp_path_factory.mktemp("loo") / "runs"
    found = polyfed.compare(
        DATA, METHODS[:2], protocol="leave-one-out", rounds=2, evaluate_every=1, batch_size=16, out=folder, unseen_part="test"
    )
    assert not found.problems
    return folder


def folders(runs: Path) -> list[Path]:
    return sorted(path.parent for path in runs.glob("*/run.toml"))


def test_runs_that_leave_out_domains_in_turn_are_one_comparison(runs: Path) -> None:
    (group,) = gather.gather(folders(runs))
    assert len(group.left_out) == 5 and group.domains("unseen") == list(group.left_out) and not group.domains("seen")
    assert [row.method for row in group.rows] == METHODS[:2] and all(row.finished for row in group.rows)
    page = words(render(folders(runs)))
    assert "Scores from different parts" not in page
    assert "on average over 5 domains held out of training, one at a time" in page
    assert "Leave-one-out: accuracy, %" in page
    # The mean is that of the five runs, each on the domain it left out.
    finals = [json.loads((path / "metrics.jsonl").read_text().splitlines()[-1]) for path in folders(runs) if "fedbn" in path.name]
    assert all(line["view"] == "unseen" for line in finals)
    row = next(row for row in group.rows if row.method == "fedbn")
    assert row.average("unseen", MEAN) == pytest.approx(sum(line["accuracy"] for line in finals) / 5)
    assert page.count("polyfed run") == 10


def test_a_domain_that_is_missing_is_said_and_the_method_cannot_win(runs: Path) -> None:
    left = [path for path in folders(runs) if path.name != "fedbn-seed0-without-pen"]
    (group,) = gather.gather(left)
    page = words(render(left))
    assert [row.method for row in group.contenders("unseen")] == ["fedavg"]
    assert "Incomplete: fedbn, seed 0, has only the runs without" in page and "so it is not ranked" in page


def test_pictures_come_from_the_data_and_only_for_runs_of_this_account(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = render(folders(runs), with_pictures=None)
    assert page.count("data:image/png") >= 5 * 10 and "The most confident mistakes of" in words(page)
    assert len(page) < 6_000_000 and "Confusion matrix: " in words(page)
    without = render(folders(runs))
    assert "data:image/png" not in without
    monkeypatch.setattr(pictures, "is_sealed", lambda content: False)
    foreign = render(folders(runs), with_pictures=None)
    assert "Another account made these runs" in words(foreign) and "data:image/png" not in foreign
    assert "data:image/png" in render(folders(runs), with_pictures=True)


@pytest.mark.chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_legend_table_and_measure_in_a_browser(runs: Path, tmp_path: Path, chromium: Path, width: int) -> None:
    pytest.importorskip("websockets")
    page = write_report(folders(runs), tmp_path / "report.html")

    asyncio.run(use_report(chromium, tmp_path / "profile", page, width, METHODS[:2]))


@pytest.mark.slow
@pytest.mark.chromium
def test_the_report_of_pacs_left_out_in_turn(shared_data: Path, tmp_path: Path, chromium: Path) -> None:
    pytest.importorskip("websockets")
    found = polyfed.compare(
        "pacs(size=16)",
        METHODS,
        protocol="leave-one-out",
        seeds=2,
        rounds=2,
        local_steps=4,
        evaluate_every=1,
        root=str(shared_data),
        model="small_cnn",
        out=tmp_path / "runs",
    )
    assert not found.problems and len(found.rows) == 4
    page = write_report(folders(tmp_path / "runs"), tmp_path / "report.html", pictures=True)
    assert page.stat().st_size < 6_000_000 and page.read_text().count("data:image/png") >= 4 * 7
    labels = [row.method for row in found.rows]
    for width in (390, 1280):
        asyncio.run(use_report(chromium, tmp_path / f"profile{width}", page, width, labels))


def test_tables_for_a_paper(runs: Path, tmp_path: Path, polyfed: Command) -> None:
    def made(form: str, name: str) -> str:
        ended = polyfed("report", runs, "--tables", form, "-o", tmp_path / name)
        assert ended.code == 0, ended.err
        return (tmp_path / name).read_text()

    text = made("md", "t.md")
    assert "| method | pen |" in text and "| *most frequent class* |" in text and text.count("\n| ") == 4
    tex = made("latex", "t.tex")
    assert "\\begin{tabular}{lrrrrrrr}" in tex and "\\bottomrule" in tex and "html" not in tex
    rows = list(csv.DictReader(made("csv", "t.csv").splitlines()))
    assert {row["measure"] for row in rows} >= {"accuracy", "balanced_accuracy", "macro_f1", "auroc"}
    assert len([row for row in rows if row["measure"] == "accuracy"]) == 2 * 7
    found = json.loads(made("json", "t.json"))
    assert found["metric"] and len(found["costs"]) == 2
    assert polyfed("report", runs, "--tables", "md", "-o", tmp_path / "folder").code == 0
    assert (tmp_path / "folder" / "tables.md").read_text() == text


def test_what_cannot_be_written_is_said(runs: Path, tmp_path: Path, polyfed: Command) -> None:
    def refused(*options: str) -> str:
        ended = polyfed("report", runs, *options)
        assert ended.code == 2 and not list(tmp_path.glob("t.*"))
        return ended.err

    assert "Add --tables latex, or pass a file name that ends in .html." in refused("-o", "t.tex")
    assert "--tables md writes .md files, but -o is t.tex." in refused("--tables", "md", "-o", "t.tex")
    assert "--tables does not support 'word'." in refused("--tables", "word")
    assert "--figures does not support 'gif'." in refused("--figures", "gif")
    assert "--metric cannot be 'f1'." in refused("--metric", "f1")
    assert "Pass a folder." in refused("--tables", "md", "--figures", "svg", "-o", "t.md")


def test_figures_for_a_paper(runs: Path, tmp_path: Path, polyfed: Command) -> None:
    ended = polyfed("report", runs, "--figures", "svg", "-o", tmp_path / "f")
    names = sorted(path.name for path in (tmp_path / "f").iterdir())
    assert ended.code == 0 and [name.rsplit("-", 1)[1] for name in names] == ["confusion.svg", "curves.svg", "scores.svg"]
    assert polyfed("report", runs, "--figures", "png", "-o", tmp_path / "one.png").code == 0
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    (group,) = gather.gather(folders(runs))
    scores = exports.score_figure(group, "unseen")
    assert "most frequent class" in [text.get_text() for text in scores.legends[0].get_texts()]
    curves = exports.curve_figure(group, "unseen")
    assert curves is not None and [tick for tick in curves.axes[0].get_xticks() if 1 <= tick <= 2] == [1, 2]


def test_the_measure_of_a_report_can_be_chosen(runs: Path, polyfed: Command, tmp_path: Path) -> None:
    assert polyfed("report", runs, "--metric", "macro_f1", "-o", "page.html", "--no-pictures").code == 0
    page = words((tmp_path / "page.html").read_text())
    assert "macro F1 on average over 5 domains" in page
