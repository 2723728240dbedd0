"""The notebooks run from top to bottom, and hold no output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.notebooks import executed, outputs
from helpers.paths import EXAMPLES

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def test_there_are_three_and_none_holds_output() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_look", "own_data_and_method", "reading_a_comparison"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [cell for cell in executed(nbformat.read(path, as_version=4), tmp_path, monkeypatch).cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs]
    assert any("<table" in output.get("data", {}).get("text/html", "") for output in shown)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in shown)
    for cell in cells:  # a figure is a picture, not the name of its class
        if cell.source.endswith(".plot()"):
            assert [sorted(output.data) for output in cell.outputs] == [["image/png", "text/plain"]]
        bars = [text for text in outputs(cell, "text/html") if "<progress" in text]
        assert len(bars) == ("polyfed.run(" in cell.source or "polyfed.compare(" in cell.source)
