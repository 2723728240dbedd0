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
    """Describe the savings of each variant at one size, and the cost of more bytes."""
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
    """Return one line per machine and set of versions."""
    for text in dict.fromkeys(circumstances(case["measured"]) for case in cases):
        yield f"* {text}"


def circumstances(measured: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items() if version != "not installed")
    return (
        f"{measured['date'].split()[0]}, commit {measured['commit']}, `{measured['command']}`, {measured['machine']}; {versions}; "
        f"load before {measured['load_before']}"
    )


def peer_table(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A round beside plain Flower's own app, as ratios."""
    yield "| payload | side | seconds a round: median (range) | rounds | times as fast as plain Flower | processor seconds a round | times less |"
    yield "|---|---|---|---|---|---|---|"
    for case in (cases[payload] for payload in PAYLOADS if payload in cases):
        for side, seconds in ((side, case["rounds"][side]) for side in SIDES if side in case["rounds"]):
            work = "not noted | "
            if "processor" in case:
                work = f"{statistics.median(case['processor'][side]):.1f} | **{gain(case, side, 'processor'):.1f}**"
            yield (
                f"| {case['title']} | {SIDES[side]} | {with_range(seconds)} | {len(seconds)} | **{gain(case, side):.1f}** | {work} |"
            )


def gain(case: Mapping[str, Any], side: str, of: str = "rounds") -> float:
    """Return how many times less a side needs than plain Flower."""
    return statistics.median(case[of]["plain"]) / statistics.median(case[of][side])


def waits_line(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Describe the cost of exchanging a small model without the waiting time of Flower's SuperNode."""
    small = cases.get("resnet_20", {}).get("rounds", {})
    if "polyfed" in small:
        seconds = statistics.median(small["polyfed"])
        yield f"* ResNet-20, {SIDES['polyfed']}: {against(gain(cases['resnet_20'], 'polyfed'), GOAL_SMALL)}"
        yield (
            f"  A round costs {seconds / BUILT_IN_WAITS:.2f} times the {BUILT_IN_WAITS:g} s that Flower's SuperNode waits by itself (goal: at most "
            f"{GOAL_WAITS:g}), and {seconds / SHORTENED_WAITS:.1f} times the {SHORTENED_WAITS:g} s of the shortened waits. `polyfed join` starts this one."
        )
    if "packed" in small:
        seconds = statistics.median(small["packed"])
        yield f"* ResNet-20, {SIDES['packed']}: {against(gain(cases['resnet_20'], 'packed'), GOAL_SMALL)}"
        yield (
            f"  A round costs {seconds / BUILT_IN_WAITS:.2f} times the {BUILT_IN_WAITS:g} s, or {seconds / (BUILT_IN_WAITS + SUPEREXEC_WAIT):.2f} times "
            f"the {BUILT_IN_WAITS + SUPEREXEC_WAIT:g} s with the second that its SuperExec lets pass between two looks for work (goal: at most {GOAL_WAITS:g})."
        )
        yield (
            "  The rest is the process that SuperExec starts for each message, three at a time on two cores: to import Flower's `flwr-clientapp` "
            "costs 1.1 s of processor, polyfed's part 0.1 s more. So there is little left to save; the warm executor starts none."
        )


def large_line(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Whether few large tensors are faster too."""
    large = cases.get("megabytes_228", {}).get("rounds", {})
    if "polyfed" not in large:
        return
    case = cases["megabytes_228"]
    work = f" {gain(case, 'polyfed', 'processor'):.1f} times less processor time." if "processor" in case else ""
    yield f"* 57 M parameters: {against(gain(case, 'polyfed'), GOAL_LARGE)}{work}"
    if "megabytes_44" in cases:
        yield (
            "  11 M parameters were measured before models were passed on in pieces (below). At a load of 25 Flower ended runs of"
            " 57 M parameters since their ServerApp's heartbeat came too late."
        )


def against(ratio: float, goal: float) -> str:
    """Compare a ratio with its goal."""
    verdict = "reached" if ratio >= goal else "**not reached**"
    return f"{ratio:.1f} times as fast as plain Flower; the goal of {goal:g} times is {verdict}."


def simulation_table(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Compare a round on Flower's simulation with the same round in process."""
    yield "| clients | method, model | in process: seconds a round | `--backend flower` | times as long |"
    yield "|---|---|---|---|---|"
    for case in cases.values():
        process, flower = case["rounds"]["process"], case["rounds"]["flower"]
        ratio = statistics.median(flower) / statistics.median(process)
        what = f"{case['method']}, {case['model']}, {case['steps']} steps"
        yield f"| {case['clients']} | {what} | {with_range(process)} | {with_range(flower)} | **{ratio:.2f}** |"


def document(everything: Mapping[str, Any]) -> str:
    """The page."""
    lines = ["# What Flower costs", ""]
    measured: list[Mapping[str, Any]] = []
    if peer := everything.get("peer"):
        lines += [*PEER, *peer_table(peer), "", *waits_line(peer), *large_line(peer), ""]
        measured += peer.values()
    if simulation := everything.get("simulation"):
        lines += [*SIMULATION, *simulation_table(simulation), ""]
        measured += simulation.values()
    if "flower" in everything:
        cases = ordered(everything["flower"])
        lines += [*BEGINNING, *table(cases), "", *gains(cases), ""]
        measured += cases
    lines += [*LOWERED, "", "## Measured with", "", *provenance(measured), "", *HOW]
    return "\n".join(lines).rstrip() + "\n"


SIDES = {
    "plain": "plain Flower's own app on Flower's SuperNodes",
    "packed": "polyfed on Flower's own SuperNodes",
    "polyfed": "polyfed on `polyfed.flower.supernode` with the warm executor",
}
PAYLOADS = ("resnet_20", "megabytes_44", "megabytes_228")
GOAL_SMALL, GOAL_LARGE, GOAL_WAITS = 8.0, 2.0, 2.0
BUILT_IN_WAITS = 3.5
"""Seconds: a SuperNode of flwr 1.41 sleeps 3 s when it found no message, and 0.5 s before it looks for its app's reply."""
SUPEREXEC_WAIT = 1.0
"""The default of FLWR_SUPEREXEC_TASK_POLL_INTERVAL."""
SHORTENED_WAITS = 0.55
"""The same two waits in ``polyfed.flower.supernode``."""
PEER = (
    "## A round beside plain Flower's own app",
    "",
    "Written by `benchmarks/bench_flower_peer.py`: three nodes, TLS and node keys, one small training step at each node, nothing evaluated.",
    "Sides run one after the other, `--turns` times, in one run of the program. The weights of polyfed are those of the run in process to the bit (the benchmark stops if they are not).",
    "Flower's SuperExecs look for work once a second, their default. Experiments on the machine were stopped for ResNet-20 and 57 M parameters, but",
    "other people's work went on (load below) and differed between the sides, and two or three rounds a side are few: ratios carry that noise.",
    "Processor time is that of all processes of a side, and carries less.",
    "",
)
SIMULATION = (
    "## Flower's simulation (Ray) beside the same run in process",
    "",
    "Written by `benchmarks/bench_flower_simulation.py`, by turns in one run; the weights at the end are the same to the bit.",
    "",
)
BEGINNING = (
    "## What an exchange costs, by size and by how a node runs its app",
    "",
    "Written by `benchmarks/bench_flower.py` from `flower.json`, before tensors were packed. One SuperLink and two SuperNodes on one machine, TLS and node keys;",
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
    "* Tensors are packed: Flower fetches every array by requests of its own, so all tensors that go to the same nodes travel as one array,",
    "  and what goes to all nodes is sent to the SuperLink once.",
    "* Replies are looked for every 0.05 s at first, then less often (a twentieth of the time waited so far, at most a second);",
    "  Flower's `send_and_receive` looks every 3 s.",
    "* A SuperNode of polyfed's and its executor pass models over a unix socket instead of HTTP. A ClientApp starts before its model has arrived,",
    "  and Flower's asks again after 1, 2, 4 and 8 s; over the socket it is answered when the model is there. The executor waits for work there",
    "  instead of asking ten times a second, each time with a request.",
    "* Memory that a message took is kept for the next, as `polyfed run` does: page by page from the kernel, putting together what came",
    "  costs 2.4 ms of processor a MB, with kept pages 0.5 (100 MB in chunks of 5 MB, joined and made a tensor, load 23).",
    "* Arrays are put together in one copy instead of two, and chunks are sent in one copy instead of two. Who only passes a model on, as the",
    "  short-lived ClientApp does, does not put it together at all: it sends the pieces as they came, and what comes back stays where it was",
    "  received. With 57 M parameters that took processor time from 24.6 to 18.5 s a round (plain Flower 46.9 and 43.6 s in the same two runs).",
    "* `python -m polyfed.flower.supernode` takes the place of `flower-supernode`: a SuperNode of flwr 1.41 that found no message sleeps 3 s and",
    "  looks right after it has replied, looks for its app's reply every 0.5 s, and waits about 1 s before it asks again for a part of a message",
    "  that is still on its way. None of these has a setting; here they are 0.5 s, 0.05 s and 0.1 s.",
    "* Requests of nodes and ServerApp go over Python's own HTTP client. A pull of 80 MB over TLS cost 0.39 to 0.54 s of processor with httpx",
    "  and 0.27 s with it (two cores at load 18; without TLS 0.26 to 0.28 s and 0.05 to 0.06 s). What the SuperLink spends on it stays:",
    "  0.14 to 0.26 s a pull and 0.44 to 0.51 s a push. Chunks are hashed once a message instead of two or three times.",
    "* In the simulation a virtual node is no client: each actor keeps the whole federation and one model, and answers for many clients a message.",
)
HOW = (
    "## How it was measured",
    "",
    "* FedAvg, one step of eight small images at each node, no evaluation and no checkpoint between rounds. An exchange is a whole round:",
    "  encoding, both ways over the network, training, averaging. The first round is left out: it builds data and model at the nodes.",
    "* Round times are the times at which a round's losses appear in `metrics.jsonl`, looked at a hundred times a second from outside.",
    "* In process: the same settings in one process, timed by an observer. The overhead is the difference of the medians.",
    "* Server, both nodes and their processes share this machine's cores and its memory; there is no real network between them.",
    "* In `bench_flower.py` SuperExec looks for work every 0.05 s (`FLWR_SUPEREXEC_TASK_POLL_INTERVAL`); Flower's default is a second.",
    "* Peak memory is the sum of the resident memory of the SuperLink and all its children, looked at twice a second; shared pages count",
    "  once for each process.",
)


def main() -> None:
    write_page(__doc__ or "", document, DATA, TEXT, "benchmarks/bench_flower.py")


if __name__ == "__main__":
    main()
