"""What FedAvg does with batch norm in every library: runs Flower, FL4Health, pfl-research and polyfed on the same two clients.

Each library gets an environment of its own beside this file, which borrows torch from the environment that runs this. Needs a
package registry and some minutes; writes ``findings.json`` and the tables of docs/batch-norm-in-libraries.md.

    python benchmarks/batch_norm/compare_libraries.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from findings import GROUPS, found_in
from two_clients import NOTES

HERE = Path(__file__).resolve().parent
DATA = HERE / "findings.json"
PAGE = HERE.parents[1] / "docs" / "batch-norm-in-libraries.md"
BLOCK = re.compile(r"(?<=<!-- written by compare_libraries.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
LIMIT = 3600


@dataclass(frozen=True)
class Library:
    """Installed packages and commands."""

    name: str
    packages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Of ``pip install``."""


FLOWER = Library("flower", ("flwr[simulation]==1.41.0",))
PFL = Library("pfl-research", ("pfl[pytorch]==0.6.0",))
# It asks for Python 3.10 and torch 2.6 in its metadata; these parts of it run with newer ones.
FL4HEALTH = Library(
    "fl4health",
    ("fl4health==0.4.2", "flwr==1.18.0", "torchmetrics==1.9.0", "lightning-utilities==0.15.3"),
    ("--no-deps", "--ignore-requires-python"),
)
POLYFED = Library("polyfed")


@dataclass(frozen=True)
class Way:
    """One way to average in a library, as its documentation shows it."""

    label: str
    library: Library
    script: str
    argument: str | None = None


WAYS = (
    Way("Flower 1.41.0, `FedAvg` of an `ArrayRecord` of the state dict", FLOWER, "with_flower_messages.py"),
    Way("Flower 1.41.0, `NumPyClient` and `FedAvg`", FLOWER, "with_flower_numpy.py"),
    Way("FL4Health 0.4.2, `FullParameterExchanger` and `BasicFedAvg`", FL4HEALTH, "with_fl4health.py", "full"),
    Way("FL4Health 0.4.2, FedBN: `LayerExchangerWithExclusions`", FL4HEALTH, "with_fl4health.py", "fedbn"),
    Way("pfl-research 0.6.0, `FederatedAveraging`", PFL, "with_pfl.py", "default"),
    Way("pfl-research 0.6.0, with `WeightByDatapoints`", PFL, "with_pfl.py", "samples"),
    Way("polyfed, `fedavg`", POLYFED, "with_polyfed.py", "fedavg"),
    Way('polyfed, `fedavg(statistics="local")`', POLYFED, "with_polyfed.py", 'fedavg(statistics="local")'),
    Way('polyfed, `fedavg(statistics="first")`', POLYFED, "with_polyfed.py", 'fedavg(statistics="first")'),
    Way('polyfed, `fedavg(statistics="drop")`', POLYFED, "with_polyfed.py", 'fedavg(statistics="drop")'),
    Way("polyfed, `fedbn`", POLYFED, "with_polyfed.py", "fedbn"),
)


class CannotRun(Exception):
    """A library that cannot be installed or run here; the reason is in the table."""


def python_of(library: Library) -> str:
    """Return the interpreter of a library's environment, and create the environment if it does not exist."""
    if not library.packages:
        return sys.executable
    home = HERE / f".venv-{library.name}"
    python, done = home / "bin" / "python", home / ".installed"
    wanted = " ".join([*library.options, *library.packages])
    if not done.exists() or done.read_text() != wanted:
        checked([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)], f"{library.name}: no environment")
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        checked([*pip, *library.options, *library.packages], "cannot be installed here")
        done.write_text(wanted)
    return str(python)


def checked(command: Sequence[str], trouble: str, **more: str) -> None:
    # Ray gives up after some seconds if the machine is busy.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_agent_register_timeout_ms": "600000", **more}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as late:
        raise CannotRun(f"{trouble}: not done after {LIMIT} seconds") from late
    if ended.returncode != 0:
        said = (ended.stderr or ended.stdout).strip().splitlines() or ["it says nothing"]
        raise CannotRun(f"{trouble}: {said[-1]}")


def findings_of(way: Way) -> dict[str, Any]:
    """Train the two clients, and tell from the notes what happened."""
    with tempfile.TemporaryDirectory() as notes:
        try:
            words = [python_of(way.library), str(HERE / way.script), *([way.argument] if way.argument else [])]
            checked(words, "does not run here", **{NOTES: notes})
        except CannotRun as reason:
            return {"failed": str(reason)}
        return found_in(Path(notes)).as_json()


def told(way: Way) -> dict[str, Any]:
    print(f"{way.label} ...", flush=True)
    return {**findings_of(way), "commit": commit()}


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout.strip()


def tables(data: Mapping[str, Any]) -> str:
    """The block of the page."""
    measured, ways = data["measured"], data["ways"]
    commits = ", ".join(dict.fromkeys(facts["commit"] for facts in ways.values()))
    return "\n".join(
        [
            f"Run on {measured['date']} at {commits} with Python {measured['python']} and torch {measured['torch']}:",
            "`python benchmarks/batch_norm/compare_libraries.py`.",
            "",
            "What both clients start round 2 with:",
            "",
            *by_group(ways, "clients"),
            "",
            "What the server's model contains after round 2 (polyfed: the model for a newcomer):",
            "",
            *by_group(ways, "server"),
            "",
        ]
    )


def by_group(ways: Mapping[str, Any], side: str) -> list[str]:
    rows = [f"| | {' | '.join(GROUPS)} |", "|---|" + "---|" * len(GROUPS)]
    for label, facts in ways.items():
        cells = [facts["failed"]] + [""] * (len(GROUPS) - 1) if "failed" in facts else [facts[side][group] for group in GROUPS]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def write_page(data: Mapping[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: tables(data), text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="run only the ways whose label holds this, and keep what is known of the others")
    parser.add_argument("--only-page", action="store_true", help="write the page from findings.json; run nothing")
    options = parser.parse_args()
    if not options.only_page:
        known = json.loads(DATA.read_text())["ways"] if options.only and DATA.exists() else {}
        measured = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        ways = {way.label: told(way) if options.only in way.label else known[way.label] for way in WAYS}
        DATA.write_text(json.dumps({"measured": measured, "ways": ways}, indent=1) + "\n")
    write_page(json.loads(DATA.read_text()))


if __name__ == "__main__":
    main()
