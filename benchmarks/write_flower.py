"""Writes benchmarks/flower.md from benchmarks/flower.json: what an exchange over Flower costs, and what lowers it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import HERE, read

DATA, TEXT = HERE / "flower.json", HERE / "flower.md"
MEGABYTE = 1_000_000
WAYS = {
    "fresh": "a fresh process for every message (`resident=false`)",
    "resident": "a resident process, Flower's SuperExec (what a node does unless told otherwise)",
    "warm": "a resident process and the warm executor (`python -m polyfed.flower.executor`)",
}


def with_range(values: Sequence[float]) -> str:
    """Median, with the least and the most in brackets."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ordered(cases: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By size, then from the plainest way to the fastest."""
    return sorted(cases.values(), key=lambda case: (case["megabytes"], list(WAYS).index(case["way"])))


def table(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| payload | nodes run asks in | seconds an exchange: median (range) | in process | overhead an exchange | exchanges measured | whole `flwr run` | server's peak memory |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        local = statistics.median(case["in_process"])
        over = statistics.median(case["rounds"]) - local
        yield (
            f"| {case['megabytes']} MB | {WAYS[case['way']]} | {with_range(case['rounds'])} | {local:.3f} | **{over:.2f} s** "
            f"| {len(case['rounds'])} | {case['whole_run']:.0f} s | {case['server_memory'] / MEGABYTE:,.0f} MB |"
        )


def gains(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each step from one way to the next saves at one size, and what more bytes cost."""
    found = {(case["megabytes"], case["way"]): statistics.median(case["rounds"]) for case in cases}
    for size in sorted({size for size, _ in found}):
        steps = [way for way in WAYS if (size, way) in found]
        if len(steps) > 1:
            told = " → ".join(f"{found[size, way]:.1f} s ({way})" for way in steps)
            yield f"* {size} MB: {told}, {found[size, steps[0]] / found[size, steps[-1]]:.1f} times less."
    sizes = sorted(size for size, way in found if way == "warm")
    if len(sizes) > 1:
        more = (found[sizes[-1], "warm"] - found[sizes[0], "warm"]) / (sizes[-1] - sizes[0])
        yield (
            f"* With the warm executor an exchange costs {found[sizes[0], 'warm']:.1f} s however small it is, and "
            f"{1000 * more:.0f} ms more for each MB of model (which goes to two nodes and comes back from both)."
        )


def provenance(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where and with what it was measured; a line for each set of circumstances."""
    for text in dict.fromkeys(circumstances(case["measured"]) for case in cases):
        yield f"* {text}"


def circumstances(measured: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items() if version != "not installed")
    return (
        f"{measured['date'].split()[0]}, commit {measured['commit']}, `{measured['command']}`, {measured['machine']}; {versions}; "
        f"load before {measured['load_before']}"
    )


def document(everything: Mapping[str, Any]) -> str:
    """The page."""
    cases = ordered(everything["flower"])
    lines = [*BEGINNING, *table(cases), "", *gains(cases), "", *LOWERED, "", "## Measured with", "", *provenance(cases), "", *HOW]
    return "\n".join(lines).rstrip() + "\n"


BEGINNING = (
    "# What an exchange over Flower costs",
    "",
    "Written by `benchmarks/bench_flower.py` from `flower.json`. One SuperLink and two SuperNodes on one machine, TLS and node keys;",
    "beside it the same rounds in process. The weights at the end are the same to the bit (the benchmark stops if they are not).",
    "",
)
LOWERED = ("## What was done to lower it", "")
HOW = ("## How it was measured", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=TEXT)
    options = parser.parse_args()
    everything = read(options.data)
    if not everything:
        raise SystemExit(f"{options.data} holds no results. Run benchmarks/bench_flower.py first.")
    options.out.write_text(document(everything))


if __name__ == "__main__":
    main()
