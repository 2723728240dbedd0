"""Break lines of core and methods on purpose, one at a time, and see whether the tests that should notice do.

    python tests/break_lines.py

Each break is made in a copy of the package; the test file beside it must fail with it, and pass without. Run it before and after a change to tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
LEFT_OUT = "not (slow or flower or network or fuzz)"
FAILED = 1
"""How pytest ends if tests ran and failed; whatever else went wrong has another number."""


@dataclass(frozen=True)
class Break:
    """``line`` stands once in ``file`` and is replaced; ``caught_by`` is the test file that must notice."""

    file: str
    line: str
    broken: str
    caught_by: str

    def __str__(self) -> str:
        return f"{self.file}: {self.line} -> {self.broken}"

    def apply(self, text: str) -> str:
        if text.count(self.line) != 1:
            raise ValueError(f"{self.file} has the line {self.line!r} {text.count(self.line)} times. Correct tests/break_lines.py.")
        return text.replace(self.line, self.broken)


BREAKS = (
    Break("core/reducers.py", "share = weight / self.total", "share = 1 / self.total", "methods/test_fedavg.py"),
    Break(
        "core/client.py",
        'generator(self.bench.settings.seed, "client", self.round, self.id)',
        'generator(self.bench.settings.seed, "client", self.round)',
        "methods/test_fedavg.py",
    ),
    Break("core/server.py", "(-info.samples, info.id)", "(info.samples, info.id)", "methods/test_what_travels.py"),
    Break("core/sharing.py", "if travel.down)", "if travel.up)", "core/test_sharing.py"),
    Break("methods/fedprox.py", "self.mu / 2 * torch", "-self.mu / 2 * torch", "methods/test_fedprox.py"),
    Break(
        "methods/fedbn.py",
        '"fedbn", sharing=(keep_local(batch_norm),)',
        '"fedbn", sharing=(keep_local(bn_statistics),)',
        "core/test_sharing.py",
    ),
    Break("methods/agc.py", "largest = clip *", "largest = 2 * clip *", "methods/test_agc.py"),
    Break("methods/scaffold.py", "new[name] - shared[name] if", "new[name] + shared[name] if", "methods/test_scaffold.py"),
    Break("methods/fixbn.py", "if client.round > last_round(", "if client.round >= last_round(", "methods/test_fixbn.py"),
    Break("methods/perxan.py", '("*score_bn",)', '("*score_in",)', "methods/test_perxan.py"),
)


def outcomes() -> Iterator[tuple[Break, bool]]:
    """Every break, and whether it was caught.

    Raises:
        RuntimeError: If a named test file fails without any break, or does not run at all.
    """
    with tempfile.TemporaryDirectory(prefix="polyfed-broken-") as folder:
        package = Path(folder) / "polyfed"
        shutil.copytree(SOURCE / "polyfed", package, ignore=shutil.ignore_patterns("__pycache__"))
        code, said = tested(package, *sorted({each.caught_by for each in BREAKS}))
        if code:
            raise RuntimeError(f"Tests fail with nothing broken:\n{said}")
        for each in BREAKS:
            path = package / each.file
            whole = path.read_text()
            path.write_text(each.apply(whole))
            code, said = tested(package, each.caught_by)
            path.write_text(whole)
            if code not in (0, FAILED):
                raise RuntimeError(f"{each.caught_by} did not run with {each}:\n{said}")
            yield each, code == FAILED


def tested(package: Path, *files: str) -> tuple[int, str]:
    """Run test files against a copy of the package; how pytest ended, and what it said."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        LEFT_OUT,
        *(str(TESTS / f) for f in files),
    ]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


if __name__ == "__main__":
    missed = 0
    for broken, caught in outcomes():
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {broken.caught_by:32}  {broken}", flush=True)
    sys.exit(bool(missed))
