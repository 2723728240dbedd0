"""The data file of the benchmarks: results by part, with the machine, versions, commit and command they were measured with."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "results.json"
LOAD_BEFORE = os.getloadavg()[0]
"""Measured when the program starts, before it adds load."""
PACKAGES = ("polyfed", "torch", "torchvision", "numpy", "pfl", "flwr", "ray")


def read(path: Path = DATA) -> dict[str, Any]:
    """Read the existing measurements."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def put(path: Path, part: str, key: str, facts: dict[str, Any], command: Sequence[str]) -> None:
    """Add or replace one result."""
    everything = read(path)
    everything.setdefault(part, {})[key] = facts | {"measured": circumstances(command)}
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(everything, indent=1) + "\n")
    beside.replace(path)


def circumstances(command: Sequence[str]) -> dict[str, Any]:
    """Return time, machine and versions of a measurement, without names of folders and hosts."""
    script, *arguments = command
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "command": " ".join([f"benchmarks/{Path(script).name}", *arguments]),
        "machine": machine(),
        "load_before": round(LOAD_BEFORE, 2),
        "versions": versions(),
    }


def commit() -> str:
    """Return the commit, with a mark if the working tree differs."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE).stdout
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "../src"], capture_output=True, text=True, check=True, cwd=HERE
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + (" with changes" if changed.stdout.strip() else "")


def machine() -> str:
    """Processor, cores and memory."""
    model = platform.machine()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()}"


def versions() -> dict[str, str]:
    """Return the installed versions of the compared packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_page(about: str, document: Callable[[Mapping[str, Any]], str], data: Path, text: Path, how: str) -> None:
    """Command line of scripts that write a page from a data file."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--out", type=Path, default=text)
    options = parser.parse_args()
    everything = read(options.data)
    if not everything:
        raise SystemExit(f"{options.data} holds no results. Run {how} first.")
    options.out.write_text(document(everything))
