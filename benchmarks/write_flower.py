"""Writes benchmarks/flower.md from benchmarks/flower.json: what an exchange over Flower costs, and what lowers it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from results import HERE, write_page

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


WORTH_SAYING = 1.15
"""Medians of three exchanges vary by about a tenth."""


def gains(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each step from one way to the next saves at one size, and what more bytes cost."""
    found = {(case["megabytes"], case["way"]): statistics.median(case["rounds"]) for case in cases}
    for size in sorted({size for size, _ in found}):
        steps = [way for way in WAYS if (size, way) in found]
        if len(steps) > 1:
            told = " → ".join(f"{found[size, way]:.1f} s ({way})" for way in steps)
            ratio = found[size, steps[0]] / found[size, steps[-1]]
            saved = f"{ratio:.1f} times less" if ratio >= WORTH_SAYING else "about the same"
            yield f"* {size} MB: {told}, {saved}."
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
    lines = [*BEGINNING, *table(cases), "", *gains(cases), "", *LOWERED, "", "## Auto with", "", *provenance(cases), "", *HOW]
    return "\n".join(lines).rstrip() + "\n"


BEGINNING = (
    "# What an exchange over Flower costs",
    "",
    "Written by `benchmarks/bench_flower.py` from `flower.json`. One SuperLink and two SuperNodes on one machine, TLS and node keys;",
    "beside it the same rounds in process. The weights at the end are the same to the bit (the benchmark stops if they are not).",
    "",
)
LOWERED = (
    "## What was done to lower it",
    "",
    "* A long-lived process: data, model and torch stay in a resident process on the node, which the short-lived ClientApp asks over a",
    "  unix socket. That ClientApp imports no torch.",
    "* The warm executor in the place of Flower's SuperExec: it has imported everything and forks for each message.",
    "* Fewer exchanges: a round of FedAvg is one question, nodes are described once, and nothing is evaluated between rounds unless asked for.",
    "* A tensor that goes to several nodes is encoded, cut and hashed once, and sent to the SuperLink once.",
    "* Replies are looked for every 0.05 s at first, then less often, up to every second; Flower's `send_and_receive` looks every 3 s.",
    "",
    "What is left and has no setting in flwr 1.41: a SuperNode that found no message sleeps 3 s and looks right after it has replied; it looks",
    "for its ClientApp's reply every 0.5 s; whoever asks for a part of a message that has not arrived yet waits about 1 s before asking again.",
)
HOW = (
    "## How it was measured",
    "",
    "* FedAvg, one step of eight small images at each node, no evaluation and no checkpoint between rounds. An exchange is a whole round:",
    "  encoding, both ways over the network, training, averaging. The first round is left out: it builds data and model at the nodes.",
    "* Round times are the times at which a round's losses appear in `metrics.jsonl`, looked at a hundred times a second from outside.",
    "* In process: the same settings in one process, timed by an observer. The overhead is the difference of the medians.",
    "* Server, both nodes and their processes share this machine's cores and its memory; there is no real network between them.",
    "* SuperExec looks for work every 0.05 s here (`FLWR_SUPEREXEC_TASK_POLL_INTERVAL`); Flower's default is a second.",
    "* Peak memory is the sum of the resident memory of the SuperLink and all its children, looked at twice a second; shared pages count",
    "  once for each process.",
)


def main() -> None:
    write_page(__doc__ or "", document, DATA, TEXT, "benchmarks/bench_flower.py")


if __name__ == "__main__":
    main()
