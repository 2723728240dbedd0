"""Freed memory that the C library keeps: much of it goes back to the system, little of it stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyfed.core.workbench import give_back_much

PROGRAM = """
import torch
from polyfed.core.workbench import give_back_much
from polyfed.runs.malloc import keep_freed_pages

def megabytes():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) // 1024

keep_freed_pages()
small = [torch.ones(60 * 2**18)]
del small
little = give_back_much()
blocks = []
for number in range(8):
    blocks.append((torch.ones(60 * 2**18), torch.ones(100_000)))
full = megabytes()
kept = [small for _, small in blocks]  # they lie between the large ones, so the heap cannot shrink at its end
del blocks
before, much, after = megabytes(), give_back_much(), megabytes()
print(little, much, full - before, full - after)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_much_goes_back_and_little_stays() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    little, much, freed_before, freed_after = done.stdout.split()
    assert (little, much) == ("False", "True"), "60 MB are kept, 480 MB are not"
    assert int(freed_before) < 100 and int(freed_after) > 400, done.stdout


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.core.workbench._library", lambda: None)
    assert not give_back_much()
