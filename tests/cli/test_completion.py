"""Shell completion: names of methods, data, models and recipes, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.paths import SOURCE
from polyfed.cli.completion import completions, names_of


def completed(words: str, place: int) -> list[str]:
    """What a bash would offer for the word at a place; torch cannot be imported while it asks."""
    script = "import sys; sys.modules['torch'] = None; from polyfed.cli.main import main; main()"
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "COMP_WORDS": words,
        "COMP_CWORD": str(place),
        "_POLYFED_COMPLETE": "complete_bash",
    }
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("polyfed re", 1, ["reproduce", "resume", "report"]),
        ("polyfed run pa", 2, ["pacs"]),
        ("polyfed run digits-mini --method fedb", 4, ["fedbn"]),
        ("polyfed run --model resnet", 3, ["resnet18", "resnet20", "resnet50"]),
        ("polyfed compare --recipe de", 3, ["demo"]),
        ("polyfed show fedwon/table-1", 2, [name for name in names_of("experiments") if name.startswith("fedwon/table-1")]),
        ("polyfed ls re", 2, ["recipes"]),
        ("polyfed run --rou", 2, ["--rounds"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_are_completed(words: str, place: int, offered: list[str]) -> None:
    assert completed(words, place) == offered


def test_the_last_method_of_a_text_is_completed() -> None:
    assert completions("fedavg; fedbn + ag", ["agc", "fedbn"], "+;") == ["fedavg; fedbn + agc"]
    assert completions("fed", ["agc", "fedbn"]) == ["fedbn"]
