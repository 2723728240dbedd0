"""Every shell and Python block of README.md and docs/ is run: here, by the test that ELSEWHERE names, or it is in NOT_RUN with the reason.

Training is cut to one step of one round. Where a line takes files of the reader's, they are made first (``Reader``). Lines with DATA
run where the real images are.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import Command
from helpers.page_blocks import blocks_of
from helpers.paths import DOCS, EXAMPLES, ROOT, SOURCE

PAGES = {page.relative_to(ROOT).as_posix(): page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}

ELSEWHERE = {
    ("docs/deploy.md", "From nothing to a model: six commands"): "test_deploy_page.py",
    ("docs/own-superlink.md", "A trial on one machine: three hospitals"): "test_own_superlink_page.py",
    ("docs/data.md", "Examples on real files"): "test_lines_on_real_files.py",
    **{(f"docs/tutorials/{page.name}", None): "test_tutorials.py" for page in (DOCS / "tutorials").glob("*.md")},
}
"""Sections (None: all) whose blocks another test in this folder runs word by word."""

INSTALL = "installs packages; make wheel installs polyfed's wheel in a clean environment"
DOWNLOAD = "downloads"
HOURS = "takes hours"
SEVERAL = "needs several machines; tests/flower/deploy and tests/flower run the same commands on one"
NOT_RUN = {
    "make demo": "tests/docs/test_readme_path.py runs what it calls",
    "make test": "runs these tests",
    "source .venv/bin/activate": "the shell's own environment",
    "pip install": INSTALL,
    "polyfed data get": DOWNLOAD,
    """polyfed run 'pacs(size=224, augment="flip_jitter", normalise="imagenet")' --root DATA --model "resnet50(pretrained""": DOWNLOAD,
    'polyfed run my_images/ --model "torchvision:resnet50': DOWNLOAD,
    "polyfed run my_images/ --model 'timm:resnet18d": "needs a file of weights",
    "polyfed reproduce fedwon/table-1 --root ~/data --form laptop": HOURS + "; tests/papers/test_reproduction.py runs a small one",
    "polyfed reproduce fedwon/table-1 --root ~/data --only": HOURS + "; tests/papers/test_reproduction.py runs a small one",
    "python benchmarks/": HOURS,
    "benchmarks/": HOURS,
    "polyfed report runs/camvid-*": "needs the four runs above it, which take hours",
    "polyfed serve demo --host fl.example.org": SEVERAL,
    "polyfed join node-1.kit": SEVERAL,
    "polyfed nodes ": SEVERAL,
    "polyfed audit verify node-1/": SEVERAL,
    "polyfed audit spent node-1/": SEVERAL,
    "FLWR_HOME=$PWD/homes/node-1 ": "goes on until it is stopped; tests/flower runs nodes and warm executors",
    "flower-superlink --host 0.0.0.0": SEVERAL,
    "flower-supernode --superlink fl.example.org": SEVERAL,
}
"""Beginnings of lines that no test runs, each with the reason."""

REAL = re.compile(r"\bDATA\b|~/data")
TRAINING = ("run", "compare", "sweep")
SHORT = ("--rounds", "1", "--local-steps", "1")
SHORT_PYTHON = (r"\brounds=\d+", "rounds=1")
RESULT = 'import polyfed\nresult = polyfed.run("digits-mini", "{}", rounds=1, local_steps=1)\n'
BEFORE = {
    "docs/methods/fedwon.md": RESULT.format("fedwon"),
    "docs/methods/fixbn.md": RESULT.format("fixbn(freeze_at=1)"),
    "docs/own-data-and-model.md": """
import torch
from torch.utils.data import TensorDataset
from my_network import my_model
lab_train = lab_test = field_train = field_test = TensorDataset(torch.randn(40, 3, 16, 16), torch.arange(40) % 2)
""",
}
"""What Python blocks of a page stand on: names that its text speaks of."""


def reason_not_to_run(line: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if line.startswith(start)), None)


def run_elsewhere(page: str, section: str) -> str | None:
    return ELSEWHERE.get((page, section)) or ELSEWHERE.get((page, None))


def lines_of(page: str, real: bool) -> list[str]:
    """Shell lines of a page that are run here, with or without real images."""
    shell = [block for block in blocks_of(PAGES[page]) if block.language == "sh" and not run_elsewhere(page, block.section)]
    lines = [line for block in shell for line in block.lines if reason_not_to_run(line) is None]
    return [line for line in lines if bool(REAL.search(line)) is real]


def python_of(page: str) -> str:
    blocks = [block for block in blocks_of(PAGES[page]) if block.language == "python" and not run_elsewhere(page, block.section)]
    # A model is saved to a file that the page names; a whole method file is run as an example.
    return "\n".join(block.body for block in blocks if "def my_model" not in block.body and "__main__" not in block.body)


# ------------------------------------------------------------------------------------------------------------- the lists
def test_the_lists_are_true() -> None:
    everything = [(name, block) for name, page in PAGES.items() for block in blocks_of(page)]
    lines = [line for _, block in everything if block.language == "sh" for line in block.lines]
    unused = [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)]
    assert not unused, f"no page has a line that starts with {unused}"
    for (page, section), test in ELSEWHERE.items():
        assert [block for name, block in everything if name == page and section in (None, block.section)], (page, section)
        reads = (Path(__file__).parent / test).read_text(encoding="utf-8")
        assert Path(page).name in reads or Path(page).parent.name in reads, f"{test} does not read {page}"


def test_no_command_is_hidden_from_this_test() -> None:
    """Commands are in fenced blocks."""
    for name, page in PAGES.items():
        assert not re.findall(r"^ {4,}(?:polyfed|pip|make) .*", page.read_text(encoding="utf-8"), re.MULTILINE), name


# ----------------------------------------------------------------------------------------------------------- the reader
NET = (
    "from torch import nn\n\ndef build(classes, input_shape):\n"
    "    return nn.Sequential(nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))\n"
)


class Reader:
    """A reader of a page: has its files and types its lines."""

    def __init__(self, page: str, folder: Path, polyfed: Command) -> None:
        self.page, self.folder, self.polyfed = page, folder, polyfed
        self.texts = PAGES[page].read_text(encoding="utf-8")
        made: dict[str, Callable[[], None]] = {
            "my_images": self.write_images,
            "my-data": self.write_masks,
            "scans.csv": self.write_table,
            "my_network": self.write_network,
            "my_package": lambda: self.write("my_package/nets.py", NET),
            "examples/": lambda: (
                shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("notebooks")) and None
            ),
            "my_method.py": self.write_method,
            "my_digits": self.write_digits,
            "other_data": self.write_digits,
            "images/": lambda: self.write_picture("images/one.png"),
            "photo.jpg": lambda: self.write_picture("photo.jpg"),
            "seven.png": lambda: self.write_picture("seven.png"),
        }
        for word, make in made.items():
            if word in self.texts:
                make()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def write_picture(self, name: str, light: int = 90) -> None:
        pixels = (light + np.random.default_rng(light).uniform(0, 30, (24, 24, 3))).clip(0, 255).astype(np.uint8)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(self.folder / name)

    def write_images(self) -> None:
        for place, domain in enumerate(("hospital_a", "hospital_b", "hospital_c")):
            for label in range(2):
                for number in range(12):
                    self.write_picture(f"my_images/{domain}/class_{label}/{number}.jpg", 40 + 40 * place + 60 * label + number)

    def write_masks(self) -> None:
        for domain in ("north", "south"):
            for number in range(8):
                self.write_picture(f"my-data/{domain}/images/{number}.png", 60 + number)
                mask = (np.indices((24, 24)).sum(0) // 12 % 3).astype(np.uint8)
                (self.folder / f"my-data/{domain}/masks").mkdir(exist_ok=True)
                Image.fromarray(mask).save(self.folder / f"my-data/{domain}/masks/{number}.png")

    def write_table(self) -> None:
        files = sorted((self.folder / "my_images").rglob("*.jpg"))
        rows = [f"{file.relative_to(self.folder)},{file.parts[-3]},{file.parts[-2]},{file.stem}" for file in files]
        self.write("scans.csv", "\n".join(["path,domain,label,group", *rows]) + "\n")

    def write_method(self) -> None:
        methods = [block.body for block in blocks_of(PAGES[self.page]) if "@polyfed.register" in block.body]
        self.write("my_method.py", methods[0] if methods else (EXAMPLES / "own_method.py").read_text(encoding="utf-8"))

    def write_network(self) -> None:
        (model,) = (block.body for block in blocks_of(PAGES[self.page]) if "def my_model" in block.body)
        self.write("my_network.py", model)

    def write_digits(self) -> None:
        subprocess.run(
            [sys.executable, EXAMPLES / "digits_mini_as_folders.py", "data"], cwd=self.folder, env=environment(), check=True
        )
        (self.folder / "data" / "hospital-1").rename(self.folder / "my_digits")

    def run_folders(self, line: str) -> None:
        """Make the runs that a line speaks of and no line before has made."""
        for name in re.findall(r"runs/[\w-]+", line if "--out" not in line else ""):
            if not (self.folder / name).exists():
                method = re.search(r"runs/digits-mini-(\w+)-seed0", name)
                words = ("compare", "digits-mini", "--methods", "fedavg; fedbn") if "compare" in name else ("run", "digits-mini")
                chosen = ("--method", method[1] if method else "fedbn") if words[0] == "run" else ()
                ended = self.polyfed(*words, *chosen, *SHORT, "--unseen", "street", "--out", name)
                assert ended.code == 0, ended.err

    def type(self, line: str) -> None:
        """Run a line."""
        line = line.replace("RUN...", "RUN runs/digits-mini-fedavg-seed0")
        line = re.sub(r"\bRUN\b", f"runs/digits-mini-{'hfedf' if 'alignment' in line else 'fedbn'}-seed0", line)
        line = line.replace("other_data", "my_digits")
        self.run_folders(line)
        if not line.startswith("polyfed "):
            ended = subprocess.run(
                ["bash", "-ec", line], cwd=self.folder, env=environment(), capture_output=True, text=True, check=False
            )
            assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"
            return
        words = shlex.split(line.rstrip(";"), comments=True)[1:]
        words = [found for word in words for found in (map(str, self.folder.glob(word)) if "*.toml" in word else [word])]
        if words[0] in TRAINING and "--estimate" not in words:
            words += SHORT
        ended = self.polyfed(*words)
        assert ended.code == 0, f"{line}\n{ended.out[-2000:]}\n{ended.err}"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines_of(page, real=False)])
def test_shell_blocks_run(page: str, polyfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader(page, tmp_path, polyfed)
    for line in lines_of(page, real=False):
        reader.type(line)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines_of(page, real=True)])
def test_lines_on_real_images_run(page: str, polyfed: Command, tmp_path: Path, shared_data: Path) -> None:
    reader = Reader(page, tmp_path, polyfed)
    for line in lines_of(page, real=True):
        line = line.replace("~/data/PACS", "my_images").replace("~/data/digits-five", "DATA").replace("~/data", "DATA")
        reader.type(re.sub(r"\bDATA\b", str(shared_data), line))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_python_blocks_run(page: str, polyfed: Command, tmp_path: Path) -> None:
    reader = Reader(page, tmp_path, polyfed)
    reader.run_folders("runs/digits-mini-fedbn-seed0" if '"RUN"' in python_of(page) else "")
    text = BEFORE.get(page, "") + re.sub(*SHORT_PYTHON, python_of(page)).replace('"RUN"', '"runs/digits-mini-fedbn-seed0"')
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=900
    )
    assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
