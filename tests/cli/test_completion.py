"""Shell completion: names of methods, data, models and recipes, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import Command, says
from helpers.paths import SOURCE
from polyfed.cli.completion import completions, names_of

SCRIPT = """
import os, sys
sys.modules["torch"] = None  # it cannot be imported
from polyfed.cli.main import app
os.environ["_POLYFED_COMPLETE"] = "bash_complete"
for line in sys.argv[1:]:
    place, _, words = line.partition(" ")
    os.environ |= {"COMP_WORDS": words, "COMP_CWORD": place}
    try:
        app(prog_name="polyfed")
    except SystemExit as end:
        assert not end.code, words
    print("next")
"""


def test_names_are_completed() -> None:
    """What a bash would offer for the word at a place."""
    cases: list[tuple[str, int, list[str]]] = [
        ("polyfed re", 1, ["reproduce", "resume", "report"]),
        ("polyfed run pa", 2, ["pacs"]),
        ("polyfed run digits-mini --method fedb", 4, ["fedbn"]),
        ("polyfed run --model resnet", 3, ["resnet18", "resnet20", "resnet50"]),
        ("polyfed compare --recipe de", 3, ["demo"]),
        ("polyfed show fedwon/table-1", 2, [name for name in names_of("experiments") if name.startswith("fedwon/table-1")]),
        ("polyfed ls re", 2, ["recipes"]),
        ("polyfed run --rou", 2, ["--rounds"]),
    ]
    lines = [f"{place} {words}" for words, place, _ in cases]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *lines], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    found = [part.split() for part in ended.stdout.split("next\n")[:-1]]
    assert found == [[f"plain,{name}" for name in offered] for _, _, offered in cases]


def test_completion_is_shown_and_installed(polyfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell, file, startup in (("zsh", ".zfunc/_polyfed", ".zshrc"), ("fish", ".config/fish/completions/polyfed.fish", None)):
        monkeypatch.setenv("SHELL", f"/bin/{shell}")
        shown = polyfed("--show-completion").out
        assert f"_POLYFED_COMPLETE={shell}_complete" in shown
        for _ in range(2):
            assert polyfed("--install-completion").code == 0
        assert (tmp_path / file).read_text().strip() == shown.strip()
        assert startup is None or (tmp_path / startup).read_text().count("compinit; compinit") == 1
    monkeypatch.setenv("SHELL", "/bin/csh")
    says(polyfed("--install-completion"), "does not support the shell 'csh'")


def test_the_last_method_of_a_text_is_completed() -> None:
    assert completions("fedavg; fedbn + ag", ["agc", "fedbn"], "+;") == ["fedavg; fedbn + agc"]
    assert completions("fed", ["agc", "fedbn"]) == ["fedbn"]
