"""Progress in a notebook: one output for each bar, however many rounds there are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.notebooks import executed, outputs
from polyfed.runs import notebook_bar
from polyfed.runs.notebook_bar import NotebookBar, NotebookWatcher, default_watcher, in_notebook, length_words
from polyfed.runs.watcher import Watcher

SMALL = '"digits-mini(per_domain=10)", model="small_cnn(width=4)"'
RUN = f"import polyfed\nresult = polyfed.run({SMALL}, rounds=30)"
QUIET = f"polyfed.run({SMALL}, rounds=2, progress=False);"
SEARCHED = f'found = polyfed.sweep({SMALL}, methods=["fedavg"], search={{"lr": [0.1]}}, rounds=1)'
COMPARED = f'found = polyfed.compare({SMALL}, methods=["fedavg", "krum(faulty=9)", "fedbn"], rounds=2)'


class Page:
    """What a page would show: each output once, and how often it was replaced."""

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
    assert in_notebook() and isinstance(default_watcher(), NotebookWatcher)
    monkeypatch.setattr("IPython.get_ipython", lambda: object())  # IPython in a terminal
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook() and type(default_watcher()) is Watcher


def test_a_bar_is_one_output_that_is_seldom_replaced(page: Page) -> None:
    bar = NotebookBar("a < b", "rounds", 1000)
    for done in range(1, 1001):
        bar.move(done)
    assert len(page.shown) == 1 and page.replaced < 100
    assert page.shown[0]["text/plain"].startswith("a < b: 1000 of 1000 rounds, ") and "left" not in page.shown[0]["text/plain"]
    assert "a &lt; b" in page.shown[0]["text/html"] and 'value="1000" max="1000"' in page.shown[0]["text/html"]


def test_the_time_left_counts_from_where_a_resumed_run_began(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(notebook_bar.time, "monotonic", lambda: next(now))
    bar = NotebookBar("fedbn", "rounds", 100, done=80)
    assert "left" not in page.shown[0]["text/plain"]
    bar.move(90)
    assert page.shown[0]["text/plain"] == "fedbn: 90 of 100 rounds, 10 s, about 10 s left"
    monkeypatch.undo()
    bar.stop()
    assert page.shown[0]["text/plain"].startswith("fedbn: 90 of 100 rounds, ") and "left" not in page.shown[0]["text/plain"]


def test_lengths_of_time_are_words() -> None:
    assert [length_words(seconds) for seconds in (0.4, 59.7, 75, 3725)] == ["0 s", "1 min 0 s", "1 min 15 s", "1 h 2 min"]


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
