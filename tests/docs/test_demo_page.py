"""The demo's table in README.md and the rates on docs/demo.md are those of the recipe, and the table is what it gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyfed
from helpers.paths import ROOT
from polyfed.core.method import methods as registered
from polyfed.studies.compare.candidates import candidates
from polyfed.studies.compare.recipes import read

ROW = re.compile(r"^ (\w+(?:\([^)]*\))?(?: with \S+)?) +((?:\d+\.\d ±\d+\.\d +)+)(\d+\.\d) ", re.MULTILINE)


def shown() -> dict[str, list[float]]:
    """The rows of README.md: domains and mean, then the worst."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {m[1]: [*map(float, re.findall(r"(\d+\.\d) ±", m[2])), float(m[3])] for m in ROW.finditer(text)}


def test_the_readme_shows_the_methods_of_the_recipe_and_the_page_their_rates() -> None:
    methods = read("demo").methods
    assert list(shown()) == list(candidates(methods)) and len(methods) == 7
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    chosen = {m[1]: float(m[2]) for m in re.finditer(r"^\| `(\S+)` \|.*\| ([\d.]+) \|$", page, re.MULTILINE)}
    assert chosen == {text: own["lr"] for text, own in methods.items()}
    for line in page.splitlines():
        if found := re.match(r"\| `(\w+)` \| (.*) \| ([\d.]+) \|$", line):
            values = [0.0 if cell == "diverged" else float(cell) for cell in found[2].split(" | ")]
            assert [0.02, 0.05, 0.1, 0.2, 0.4][values.index(max(values))] == float(found[3])


@pytest.mark.slow
def test_the_demo_gives_the_table_of_the_readme(tmp_path: Path) -> None:
    recipe = read("demo")
    settings = {name: value for name, value in recipe.values.items() if name not in ("data", "method")}
    found = polyfed.compare("digits-mini", recipe.methods, workers="auto", out=tmp_path, **settings)
    for row in found.rows:
        assert row.mean is not None and row.worst is not None
        ours = [*(number.value for number in row.seen.values()), row.mean.value, row.worst.value]
        # Other releases of torch round differently, and one image is half a point.
        assert [100 * value for value in ours] == pytest.approx(shown()[row.method], abs=4.0)


def test_readme_counts_the_methods() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    count = len(registered.names())
    assert f"{count} methods and parts" in text
    libraries = (ROOT / "docs" / "other-libraries.md").read_text(encoding="utf-8")
    assert f"| {count}, including parts |" in libraries
