"""The lines of docs/data.md that are shown on real files run where the files are, with fewer steps."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.paths import DOCS

BLOCK = re.compile(r"<!-- lines on real files -->\n```sh\n(.*?)```", re.DOTALL)
FEW = ("--rounds", "1", "--local-steps", "2", "--batch-size", "8", "-q", "--json")


def lines() -> list[str]:
    found = BLOCK.search((DOCS / "data.md").read_text())
    assert found is not None
    return found[1].splitlines()


def test_there_is_a_line_for_every_kind_of_data() -> None:
    text = "\n".join(lines())
    for word in ("fixbn", "fedwon", "weighted_focal", 'split="lesions"', "vlcs", "class_and_domain", "PACS/ ", "table.csv"):
        assert word in text


@pytest.mark.slow
def test_they_run(polyfed: Command, shared_data: Path, tmp_path: Path) -> None:
    measures = []
    for line in lines():
        line = line.replace("DATA", str(shared_data))
        if not line.startswith("polyfed"):
            subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
            continue
        ended = polyfed(*shlex.split(line)[1:], *FEW)
        assert ended.code == 0, f"{line}\n{ended.err}"
        measures.append((ended.json["metric"], ended.json))
    assert [measure for measure, _ in measures] == [
        "mean_iou", "mean_iou", "balanced_accuracy", "balanced_accuracy", "macro_f1", "accuracy", "accuracy"
    ]  # fmt: skip
    assert "Seq05VD" in measures[0][1]["accuracy"]["unseen"]
    assert any("sketch lacks house, person" in notice for notice in measures[5][1]["notices"])
    groups = [line.split(",") for line in (tmp_path / "PACS" / "table.csv").read_text().splitlines()[1:]]
    assert len(groups) == 1670 + 3929 - 80 - 160, "all images of both domains but those of the two classes"
