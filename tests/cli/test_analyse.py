"""``polyfed analyse``: figures, tables and numbers, and a reason for each analysis that does not apply."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import polyfed as package
from helpers.command_line import Command
from polyfed.studies.analyse.kinds import KINDS

DATA = "digits-mini(per_domain=16)"
SHORT: dict[str, Any] = {"rounds": 1, "batch_size": 16, "model": "small_cnn(width=4)", "unseen": "photo"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedavg + group_norm(groups=2)"):
        package.run(DATA, method, out=folder / method.replace(" ", ""), **SHORT)
    return folder


def test_every_kind_is_found_or_says_why_not(runs: Path, polyfed: Command) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    ended = polyfed("analyse", runs, "-o", "why", "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    applied = {one["kind"] for one in found["analyses"]}
    assert applied | {one["kind"] for one in found["skipped"]} == set(KINDS)
    assert applied == set(KINDS) - {"alignment", "grid"}
    assert all(Path("why", name).stat().st_size for name in found["files"])
    numbers = json.loads(Path("why/analyses.json").read_text())
    assert numbers["analyses"] == found["analyses"]
    bias = {
        (row["run"], row["norm"]): float(row["bias"])
        for row in csv.DictReader(Path("why/gradient-bias.csv").read_text().splitlines())
    }
    assert bias["fedavg", "as trained"] > 0.01
    assert bias["fedavg", "statistics fixed"] < 1e-4 and bias["fedavg + group_norm(groups=2)", "as trained"] < 1e-4
    assert "norm-statistics does not apply to fedavg + group_norm(groups=2): " in ended.out
    assert "has no batch-norm statistics" in ended.out and "alignment does not apply to fedavg" in ended.out
    assert before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}


def test_chosen_kinds_and_wrong_ones(runs: Path, polyfed: Command) -> None:
    ended = polyfed("analyse", runs / "fedavg", "--kind", "confidence", "-o", "one", "--figures", "svg")
    assert sorted(path.name for path in Path("one").iterdir()) == [
        "analyses.json", "confidence-histogram.csv", "confidence-means.csv", "confidence.svg"
    ]  # fmt: skip
    assert "mean confidence on seen domains" in ended.out.lower() and "unseen" in ended.out
    listed = polyfed("analyse", "--kinds")
    assert listed.code == 0 and all(name in listed.out for name in KINDS)
    wrong = polyfed("analyse", runs, "--kind", "confidenze")
    assert wrong.code == 2 and "There is no analysis 'confidenze'. Did you mean confidence?" in wrong.err
    assert polyfed("analyse").code == 2 and "RUN is missing." in polyfed("analyse").err
    assert "--figures does not support 'gif'" in polyfed("analyse", runs / "fedavg", "--kind", "confidence", "--figures", "gif").err


def test_the_same_in_python(runs: Path) -> None:
    found = package.analyse(runs / "fedavg", ["confidence", "alignment"])
    assert len(found) == 1 and found["confidence"].tables["means"][0]["run"] == "fedavg"
    assert "<img" in found._repr_html_()
    with pytest.raises(package.PolyfedError, match="logs no values per client"):
        found["alignment"]
    result = package.run(DATA, "fedavg", **SHORT)
    direct = package.analyse(result, ["gradient-bias", "norm-drift"])
    assert direct["gradient-bias"].tables["bias"][0]["bias"] > 0.01
    assert "Train it with out=FOLDER" in direct.skipped[0].reason
