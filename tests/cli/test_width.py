"""Eighty columns: tables select columns that fit, break no words, and show the number of hidden columns; --explain adds footnotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.command_line import Command
from polyfed.cli.output import View, print_footnotes
from polyfed.cli.tables import FittedTable, print_table
from polyfed.papers import files

WIDTH = 80
METHODS = "fedavg; fedbn + agc(clip=1.28); fixbn(freeze_at=0.5) with lr=0.1, weight_decay=0.001"
NOT_TABLES = ("polyfed ", "run folder", "page: ", "all trials")
"""What may be wider than the terminal: commands and paths, which are there to be copied."""
LISTS = ("methods", "data", "models", "partitions", "losses", "recipes", "experiments")
SHOWN = (
    ("fedbn",),
    ("fedsr + agc(clip=1.28)",),
    ("dp_sgd", "--privacy"),
    ("resnet20",),
    ("digits-mini",),
    ("office-caltech10",),
    ("domain_even",),
    ("demo",),
    ("fedwon/table-1",),
)

At = Callable[..., str]


@pytest.fixture
def at(polyfed: Command, monkeypatch: pytest.MonkeyPatch) -> At:
    """What a command prints at a width."""

    def printed(columns: int, *words: str | Path) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        ended = polyfed(*words)
        assert ended.code == 0, ended.err
        return ended.out

    return printed


def fits(narrow: str, broad: str) -> None:
    """No line is too wide, and no word is there that the wide output does not have."""
    for line in narrow.splitlines():
        assert len(line.rstrip()) <= WIDTH or line.startswith(NOT_TABLES), line
    assert "…" not in narrow
    strange = set(pieces(narrow)) - set(pieces(broad))
    assert not strange, f"broken words: {strange}"


def pieces(text: str) -> list[str]:
    """The words of an output; what differs between two calls or two widths is left out."""
    text = re.sub(r"^Best minus .*?--explain\.", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if "--wide" not in line and "--explain" not in line]
    words = [word.strip("()") for line in lines for word in line.split()]
    return [word for word in words if not set(word) <= set("─0123456789.,+-x±")]


def test_lists_and_what_show_prints_fit(at: At) -> None:
    for words in (*(("ls", kind) for kind in LISTS), *(("show", *words) for words in SHOWN)):
        fits(at(WIDTH, *words), at(1000, *words, "--wide"))


def test_a_run_fits(at: At, images: Path) -> None:
    run = ("run", images, "--method", "fedbn", "--rounds", "1", "--unseen", "night", "-o")
    narrow, broad = at(WIDTH, *run, "a"), at(1000, *run, "b", "--wide")
    fits(narrow.replace("folder: a", "folder: b"), broad)
    assert " ".join(narrow.split()).count("More: --explain.") == 1
    assert "± is the standard error over the test images. More: --explain." in narrow
    explained = at(WIDTH, "evaluate", "a", "--explain")
    assert "most frequent class: accuracy of always predicting that class." in " ".join(explained.split())


def test_a_comparison_fits(at: At) -> None:
    words = ("compare", "digits-mini", "--methods", METHODS, "--rounds", "1", "--model", "lenet", "--out", "out")
    narrow, broad = at(WIDTH, *words), at(1000, *words, "--wide", "--explain")
    fits(narrow, broad)
    table = narrow.partition("cost and privacy")[0]
    head = next(line.split() for line in table.splitlines() if line.strip().startswith("method"))
    assert head == ["method", "pen", "photo", "post", "print", "street", "mean", "worst", "MB", "up"]
    assert "digits-mini: accuracy in % (2 more columns: --wide)" in table
    assert "extra MB" in " ".join(broad.split()) and "more column" not in broad
    assert " ".join(narrow.split()).count("More: --explain.") == 1
    footnote = (
        r"Best minus second best: \S+ to \S+ points \(95 % interval over test images\); [a-z ]+; one seed\. "
        r"± is the standard error\. More: --explain\."
    )
    assert re.search(footnote, " ".join(narrow.split()))
    assert "McNemar" not in narrow and "McNemar" in broad
    assert (
        "extra CPU s: additional CPU seconds of training per round" not in narrow
        and "extra CPU s: additional CPU seconds of training per round" in broad
    )
    # A narrower terminal keeps mean and worst; fedavg is in the folder already.
    narrow = at(44, *words[:3], "fedavg; fedbn", *words[4:])
    head = next(line.split() for line in narrow.splitlines() if line.strip().startswith("method"))
    assert head[:3] == ["method", "mean", "worst"]
    assert all(len(line.rstrip()) <= 44 or line.startswith(NOT_TABLES) for line in narrow.splitlines() if "%" not in line)


def test_the_doctor_fits(at: At, images: Path) -> None:
    words = ("doctor", images, "--model", "small_cnn", "--batch-size", "8")
    narrow, broad = at(WIDTH, *words), at(1000, *words, "--wide", "--explain")
    fits(narrow, broad)
    assert "(1 more column: --wide)" in narrow and "known" in broad
    assert " ".join(narrow.split()).count("More: --explain.") == 1
    assert "known: lowest and highest value of polyfed's reference federations." in broad


def test_a_sweep_fits(at: At) -> None:
    """The second call reads the trials of the first, so both print the same numbers."""
    methods = "fedavg; fedbn + agc(clip=1.28)"
    data = ("sweep", "digits-mini(per_domain=20)", "--methods", methods, "--model", "lenet", "--rounds", "1")
    grid = ("--lr", "0.01,0.1", "--set-grid", "momentum=0.0,0.9", "--set-grid", "weight-decay=0.0,0.001", "--out", "out")
    narrow, broad = at(WIDTH, *data, *grid), at(1000, *data, *grid, "--wide", "--explain")
    fits(narrow, broad)
    search, _, tests = narrow.partition("test results of the best settings")
    head = next(line.split() for line in search.splitlines() if line.strip().startswith("method"))
    assert head[0] == "method" and head[-3:] == ["validation", "%", "chosen"] and search.count("<--") == 2
    assert "mean" in tests and "worst" in tests
    assert " ".join(narrow.split()).count("More: --explain.") == 1 and "test data is not read" in broad


def test_a_narrower_sweep_leaves_searched_settings_out(at: At) -> None:
    data = ("sweep", "digits-mini(per_domain=20)", "--methods", "fedavg", "--model", "lenet", "--rounds", "1")
    narrow = at(30, *data, "--lr", "0.01", "--set-grid", "weight-decay=0.0", "--out", "out").partition("test results of")[0]
    assert "(2 more columns: --wide)" in " ".join(narrow.split()) and "weight_decay" not in narrow and "validation %" in narrow
    assert all(len(line.rstrip()) <= 30 for line in narrow.splitlines() if "more column" not in line)


WIDE_EXPERIMENT = """\
title = "A comparison with many columns and a title that needs more than a line of eighty columns"
paper = "A paper with a name"
item = "Table 1"
claim = "FedBN is above FedAvg."
measure = "accuracy, percent"
seeds = 1
[settings]
data = "digits-mini(per_domain=20)"
model = "lenet"
rounds = 1
[methods]
"FedAvg as published" = { method = "fedavg" }
[[part]]
name = "seen"
columns = ["pen", "photo", "post", "print", "street", { name = "avg", read = "mean" }]
rows = { "FedAvg as published" = "90.12±1.00 91.12±1.00 92.12±1.00 93.12±1.00 94.12±1.00 92.12±1.00" }
"""


@pytest.fixture
def wide_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "experiments" / "wide"
    folder.mkdir(parents=True)
    (folder / "table-1.toml").write_text(WIDE_EXPERIMENT)
    monkeypatch.setattr(files, "SHIPPED", folder.parent)
    files.read_item.cache_clear()
    yield
    files.read_item.cache_clear()


@pytest.mark.usefixtures("wide_experiment")
def test_a_reproduced_table_fits_and_keeps_its_average(at: At) -> None:
    words = ("reproduce", "wide/table-1", "--out", "out")
    narrow, broad = at(WIDTH, *words), at(1000, *words, "--wide", "--explain")
    fits(narrow, broad)
    assert "more columns: --wide" in narrow and "more column" not in broad
    head = next(line.split() for line in narrow.splitlines() if "avg" in line)
    assert head[-1] == "avg" and "street" not in head and "street" in broad
    assert "Each cell: published / ours (difference). More: --explain." in narrow


def test_the_last_columns_go_first_and_all_are_as_wide_as_they_need_to_be() -> None:
    columns, words = ["name", "what", "s", "s"], "several plain words that may be wrapped where there is a blank"
    made = FittedTable(columns, [("a", words, "1.0", "2.0 ±0.1"), None], {"s"}, (("what",), ("s",)))
    assert made.hidden(80) == []
    assert made.hidden(40) == ["s", "s"]
    assert made.hidden(25) == ["what"], "a later column that fits is shown though an earlier one does not"
    assert made.hidden(15) == ["what", "s", "s"]
    assert made.printed_width(30) == 30
    assert made.printed_width(30, wide=True) == 2 + 4 + 2 + 62 + 2 + 3 + 2 + 8
    with pytest.raises(ValueError, match="A row has 1 cells, but the table has 4 columns"):
        FittedTable(columns, [("alone",)])


def test_a_word_wider_than_the_terminal_is_printed_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table("", ["name"], [("x" * 60,), ("[bold]\x1b[31m",)])
    printed = capsys.readouterr().out
    assert "x" * 60 in printed and "[bold]\\x1b[31m" in printed, "cells are text: neither markup nor what a terminal would obey"


def test_all_footnotes_need_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_footnotes("A note.", ["One.", "", "Two."], View())
    assert capsys.readouterr().out == "A note. More: --explain.\n"
    print_footnotes("", ["One.", "", "Two."], View(explain=True))
    assert capsys.readouterr().out == "One.\nTwo.\n"
