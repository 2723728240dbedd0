"""Progress: one bar for all runs; in a notebook one output per bar, for any number of rounds."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.notebooks import executed, outputs
from polyfed.runs.callbacks import progress
from polyfed.runs.callbacks.callback import Callbacks, RunState
from polyfed.runs.callbacks.progress import (
    NotebookBar,
    ProgressBar,
    TerminalBar,
    default_callbacks,
    format_duration,
    in_notebook,
)
from polyfed.settings import Settings

SMALL = '"digits-mini(per_domain=10)", model="small_cnn(width=4)"'
RUN = f"import polyfed\nresult = polyfed.run({SMALL}, rounds=30)"
QUIET = f"polyfed.run({SMALL}, rounds=2, progress=False);"
SEARCHED = f'found = polyfed.sweep({SMALL}, methods=["fedavg"], search={{"lr": [0.1]}}, rounds=1)'
COMPARED = f'found = polyfed.compare({SMALL}, methods=["fedavg", "krum(faulty=9)", "fedbn"], rounds=2)'


class Page:
    """A page with each output, and how often it was replaced."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.replaced = 0

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.shown.append(data)
        place = len(self.shown) - 1

        def update(data: dict[str, str], raw: bool) -> None:
            self.shown[place] = data
            self.replaced += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """A notebook without its kernel."""
    made, shell, shown = Page(), ModuleType("IPython"), ModuleType("IPython.display")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown.display = made.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return made


def test_only_the_kernel_of_a_notebook_is_one(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    (bar,) = default_callbacks(None)
    assert in_notebook() and isinstance(bar, ProgressBar) and bar.show
    monkeypatch.setattr("IPython.get_ipython", lambda: object())  # IPython in a terminal
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook() and default_callbacks(None) == [] and not ProgressBar().show


def test_a_bar_is_one_output_that_is_seldom_replaced(page: Page) -> None:
    bar = NotebookBar()
    for done in range(1001):
        bar.move(done, 1000, "rounds", "a < b")
    assert len(page.shown) == 1 and page.replaced < 100
    assert page.shown[0]["text/plain"].startswith("a < b: 1000 of 1000 rounds, ") and "left" not in page.shown[0]["text/plain"]
    assert "a &lt; b" in page.shown[0]["text/html"] and 'value="1000" max="1000"' in page.shown[0]["text/html"]


def test_the_time_left_counts_from_where_a_resumed_run_began(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    bar = NotebookBar()
    bar.move(80, 100, "rounds", "fedbn")
    assert "left" not in page.shown[0]["text/plain"]
    bar.move(90, 100, "rounds", "fedbn")
    assert page.shown[0]["text/plain"] == "fedbn: 90 of 100 rounds, 10 s, about 10 s left"
    monkeypatch.undo()
    bar.stop()
    assert page.shown[0]["text/plain"].startswith("fedbn: 90 of 100 rounds, ") and "left" not in page.shown[0]["text/plain"]


def state(number: int, rounds: int = 4) -> RunState:
    return RunState("fedbn", "toy", 0, number, rounds, {}, (), 0, 0, Settings(), None)


def ended(number: int) -> Any:
    return SimpleNamespace(experiment=SimpleNamespace(server=SimpleNamespace(round=number)), words="accuracy 80 %")


def test_the_bar_over_runs_moves_with_every_round() -> None:
    with ProgressBar(show=True) as bar:
        assert isinstance(bar.bar, TerminalBar)
        (task,) = bar.bar.progress.tasks
        assert (task.total, task.description) == (None, "Preparing data")
        run = Callbacks([bar], "fedbn, seed 0", before=1, total=4)
        run.begin(state(0))
        assert (task.completed, task.total, task.description) == (1, 4, "run 2 of 4: fedbn, seed 0")
        run.after_round(state(3))
        assert task.completed == 1.75 and task.fields["count"] == "1/4 runs"
        run.end(ended(4))
        assert task.completed == 2
    with ProgressBar(show=True) as bar:
        assert isinstance(bar.bar, TerminalBar)
        bar.begin(state(1))
        bar.after_round(state(2))
        (task,) = bar.bar.progress.tasks
        assert (task.completed, task.total, task.fields["count"], task.description) == (2, 4, "2/4 rounds", "fedbn")


def test_without_a_bar_each_run_is_a_line_and_each_message_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(show=False, report=True)
    for first, last, how in ((0, 4, "trained"), (2, 4, "resumed"), (4, 4, "reused"), (0, 3, "stopped after round 3, trained")):
        run = Callbacks([bar], "fedbn, seed 0")
        run.begin(dataclasses.replace(state(first), resumed=first > 0))
        for number in range(first + 1, last + 1):
            run.after_round(state(number))
        run.end(ended(last))
        run.message("Careful.")
        out, told = capsys.readouterr()
        assert out == "" and told == f"fedbn, seed 0: accuracy 80 %, {how}\n" + "polyfed: Careful.\n" * ((first, last) == (0, 4))
    silent = ProgressBar(show=False, message=None)
    silent.begin(state(0))
    silent.end(ended(4))
    silent.message("Careful.")
    assert capsys.readouterr() == ("", "")


def test_lengths_of_time_are_words() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 59.7, 75, 3725)] == ["0 s", "1 min 0 s", "1 min 15 s", "1 h 2 min"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bars_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(source) for source in (RUN, QUIET, COMPARED, SEARCHED)]
    one, quiet, many, searched = executed(nbformat.v4.new_notebook(cells=cells), tmp_path, monkeypatch).cells
    assert len(one.outputs) == 1 and "fedavg: 30 of 30 rounds" in outputs(one, "text/plain")[0]
    assert not any("<progress" in text for text in outputs(quiet, "text/html"))
    notice, bar = sorted(many.outputs, key=lambda output: output.output_type != "stream")
    assert "krum" in notice.text and "runs, " in bar.data["text/plain"] and "<progress" in bar.data["text/html"]
    assert ["Trained: 2 of 2 runs, " in text for text in outputs(searched, "text/plain")] == [True] and len(searched.outputs) == 1
