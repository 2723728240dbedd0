"""A user who follows only the README: the demo, own images, an own method, a model file, and where deployment is explained.

The commands are read from the page. What is added is ``--rounds 2``, which the page names as the way to try them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import Command, Ended
from helpers.paths import DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ("--rounds", "2")
NET = '''
from torch import nn

def build(classes, input_shape):
    """Any torch module that gives one logit per class."""
    channels = input_shape[0]
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
'''


def lines(start: str) -> list[list[str]]:
    """The README's commands that begin so, as words."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE))
    found = [shlex.split(line, comments=True) for line in blocks.splitlines() if line.startswith(start)]
    assert found, f"README.md has no command {start}"
    return found


def demo_commands() -> list[list[str]]:
    """What ``make demo`` with the README's argument for a quick look would call."""
    asked = re.search(r"`make demo (ARGS=\"[^\"]+\")`", README)
    assert asked is not None
    words = shlex.split(asked[1])
    planned = subprocess.run(["make", "--dry-run", "demo", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line)[1:] for line in planned.splitlines() if re.match(r"\S*/bin/polyfed ", line)]


def write_images(root: Path) -> None:
    rng = np.random.default_rng(0)
    for place, domain in enumerate(("hospital_a", "hospital_b", "hospital_c")):
        for label in ("benign", "malignant"):
            (root / domain / label).mkdir(parents=True)
            for number in range(12):
                light = 60 * place + (80 if label == "malignant" else 20)
                pixels = (light + rng.uniform(0, 30, (24, 24, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / domain / label / f"{number:02}.jpg")


def test_the_readme_says_where_to_go_for_deployment() -> None:
    first_screen = README.partition("## Two commands")[0]
    assert "(docs/deploy.md)" in first_screen
    assert "polyfed serve" in (DOCS / "deploy.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_whole_path(polyfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'polyfed[export]'")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("notebooks"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def done(*words: str) -> Ended:
        ended = polyfed(*words)
        assert ended.code == 0, f"{' '.join(words)}: {ended.err}"
        return ended

    table, report = (done(*words) for words in demo_commands())
    for method in ("fedavg", "fedbn", "fedwon", "fixbn", "fedstein", "gperxan", "hfedf"):
        assert re.search(rf"^ {method}\b", table.out, re.MULTILINE), method
    assert "runs/demo/report.html" in report.out.replace("\n", "")
    assert Path("runs/demo/report.html").stat().st_size > 10_000

    write_images(tmp_path / "my_images")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "nets.py").write_text(NET, encoding="utf-8")
    run = done(*lines("polyfed run ./my_images")[0][1:], *SHORT)
    folder = re.search(r"^run folder: (\S+)$", run.out, re.MULTILINE)
    assert folder is not None and "hospital_c" in run.out

    (method,) = re.findall(r"^```python\n(import polyfed\n\nHEAD.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_method.py").write_text(method, encoding="utf-8")
    compared = done(*lines("polyfed compare digits-mini")[0][1:], *SHORT)
    assert "own_head + fedprox" in " ".join(compared.out.split())

    shutil.copy(tmp_path / "my_images" / "hospital_a" / "benign" / "00.jpg", "photo.jpg")
    for start in ("polyfed doctor", "polyfed evaluate RUN", "polyfed predict RUN", "polyfed report RUN", "polyfed export RUN"):
        (words,) = lines(start)
        done(*(folder[1] if word == "RUN" else word for word in words[1:]))
    assert Path("report.html").is_file()

    import onnxruntime

    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map and session.get_inputs()
