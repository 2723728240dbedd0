"""Damage random files of a run folder: each command reports it or returns the same result, without a stack trace."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import Command, Ended

DATA = "digits-mini(per_domain=10)"
OPTIONS = "--method fedbn --rounds 3 --batch-size 8 --evaluate-every 1 --checkpoint-every 1 -q"
COMMANDS: dict[str, tuple[str, ...]] = {
    "digest": ("digest", "run", "--json"),
    "evaluate": ("evaluate", "run", "--json", "-q"),
    "predict": ("predict", "run", "image.png", "--json", "-q"),
    "report": ("report", "run", "-o", "page.html"),
    "resume": ("resume", "run", "--json", "-q"),
}
"""``resume`` is last, since it writes."""


def flip(content: bytes, rng: random.Random) -> bytes | None:
    if not content:
        return b"\0"
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def shorten(content: bytes, rng: random.Random) -> bytes | None:
    return content[: rng.randrange(max(1, len(content)))]


def delete(content: bytes, rng: random.Random) -> bytes | None:
    return None


def replace(content: bytes, rng: random.Random) -> bytes | None:
    return rng.choice([b"", rng.randbytes(rng.randrange(1, 400)), b"\0" * len(content), content + content, b"{}\n", b"[" * 100_000])


DAMAGES: tuple[Callable[[bytes, random.Random], bytes | None], ...] = (flip, shorten, delete, replace)


class Folder:
    """A run folder that can be restored, with the output of the commands."""

    def __init__(self, home: Path, polyfed: Command, finished: bool) -> None:
        self.home, self.polyfed, self.run = home, polyfed, home / "run"
        ended = polyfed("run", DATA, *OPTIONS.split(), "--out", "run")
        assert ended.code == 0, ended.err
        if not finished:
            for path in (self.run / "checkpoint").glob("*_final*"):
                path.unlink()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(home / "image.png")
        self.copy = home / "copy"
        shutil.copytree(self.run, self.copy)
        self.files = sorted(path.relative_to(self.run) for path in self.run.rglob("*") if path.is_file())
        self.before: dict[str, Any] = {}
        self.reported: dict[str, list[str]] = {}
        for name, words in COMMANDS.items():
            ended = polyfed(*words)
            self.before[name] = self.outcome(name, ended)
            self.reported[name] = self.reports(name, ended, self.before[name])

    def outcome(self, name: str, ended: Ended) -> Any:
        """Return the result of a command, without values that differ between runs."""
        assert ended.code in (0, 2) and "Traceback" not in ended.err, ended.err
        if ended.code == 2:
            return None
        if name == "report":
            return (self.home / "page.html").read_text()
        return {key: ended.json[key] for key in ("digest", "accuracy", "predictions", "round") if key in ended.json}

    def reports(self, name: str, ended: Ended, found: Any) -> list[str]:
        """Return the warnings about the state of the run."""
        page = re.findall(r"Unfinished: [^<]*has come to round \d+", str(found)) if name == "report" else []
        return [line for line in ended.err.splitlines() if "polyfed: warning" in line] + page

    def restore(self) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(self.copy, self.run)

    def judge(self, rng: random.Random) -> list[str]:
        """Damage one file, and return the commands that did not report it but have a different result."""
        self.restore()
        file, damage = rng.choice(self.files), rng.choice(DAMAGES)
        content = damage((self.run / file).read_bytes(), rng)
        if content is None:
            (self.run / file).unlink()
        else:
            (self.run / file).write_bytes(content)
        wrong = []
        for name, words in COMMANDS.items():
            ended = self.polyfed(*words)
            found = self.outcome(name, ended)
            noticed = file.name in ended.err + str(found) or self.reports(name, ended, found) != self.reported[name]
            if ended.code == 2:
                if not ended.err.strip().splitlines()[-1].startswith("polyfed: "):
                    wrong.append(f"{damage.__name__} {file}: {name} ended without an error message: {ended.err}")
            elif found != self.before[name] and not noticed:
                wrong.append(f"{damage.__name__} {file}: {name} has a different result and printed {ended.err!r}")
        return wrong


def damaged(folder: Folder, turns: range, seed: int) -> None:
    wrong = [problem for turn in turns for problem in folder.judge(random.Random(f"{seed} {turn}"))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_file_is_noticed_or_changes_nothing(finished: bool, polyfed: Command, tmp_path: Path) -> None:
    damaged(Folder(tmp_path, polyfed, finished), range(12), seed=1)


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
@pytest.mark.parametrize("finished", [True, False])
def test_a_thousand_damaged_files_are_noticed_or_change_nothing(
    finished: bool, first: int, polyfed: Command, tmp_path: Path
) -> None:
    """In parts, so that several processes can share them."""
    damaged(Folder(tmp_path, polyfed, finished), range(first, first + 100), seed=2)
