"""Check that two commits give bit-identical results: every method, workers, kill -9 and resume, Flower, and old run folders in the new code.

python benchmarks/compare_digests.py BEFORE AFTER [--flower] [--out FILE]

Each commit is checked out in a temporary folder and run with the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).with_name("digest_cases.py")
SHOWN = 12


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def checked_out(commit: str, folder: Path) -> Path:
    """Extract the package of a commit into a separate folder; ``.`` is the working tree."""
    if commit == ".":
        return ROOT / "src"
    folder.mkdir()
    files = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=files, check=True)
    return folder / "src"


def digests(source: Path, *options: str) -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(CASES), *options], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def page(before: str, after: str, old: dict[str, str], new: dict[str, str], reopened: dict[str, str]) -> str:
    """Format the outcome as Markdown."""
    names = sorted(old.keys() | new.keys())
    equal = [name for name in names if old.get(name) == new.get(name)]
    opened = [name for name, digest in reopened.items() if digest == old[f"{name}, 4 rounds"]]
    lines = [
        "# Digests of two commits",
        "",
        f"`python benchmarks/compare_digests.py {before} {after}`, on digits-mini, seed 0.",
        "",
        f"{len(equal)} of {len(names)} cases are equal. {len(opened)} of {len(reopened)} run folders that the first commit wrote",
        "are opened by the second with the digest they were written with.",
        "",
        "| run | before | after | equal |",
        "|---|---|---|---|",
    ]
    for name in names:
        one, other = old.get(name, "missing"), new.get(name, "missing")
        lines.append(f"| {name} | {shown(one)} | {shown(other)} | {'yes' if one == other else '**no**'} |")
    return "\n".join(lines) + "\n"


def shown(digest: str) -> str:
    return digest if " " in digest or digest == "missing" else f"`{digest[:SHOWN]}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit, or . for the working tree")
    parser.add_argument("after", help="likewise")
    parser.add_argument("--flower", action="store_true", help="also a run over Flower's simulation")
    parser.add_argument("--out", metavar="FILE", help="write the table there too")
    options = parser.parse_args()
    before, after = (word if word == "." else git("rev-parse", "--short", word) for word in (options.before, options.after))
    flower = ["--flower"] if options.flower else []
    with tempfile.TemporaryDirectory() as spare:
        home = Path(spare)
        sources = [checked_out(commit, home / side) for commit, side in ((before, "before"), (after, "after"))]
        old = digests(sources[0], "--write", str(home / "runs"), *flower)
        new = digests(sources[1], *flower)
        reopened = digests(sources[1], "--read", str(home / "runs"))
    text = page(before, after, old, new, reopened)
    print(text)
    if options.out:
        Path(options.out).write_text(text)
    same = old == new and all(digest == old[f"{name}, 4 rounds"] for name, digest in reopened.items())
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
