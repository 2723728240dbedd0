"""Write benchmarks/results.md from benchmarks/results.json: tables with targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contenders import CONTENDERS
from results import DATA, write_page

TEXT = DATA.with_suffix(".md")
PROFILES = DATA.parent / "profiles"
MEGABYTE = 2**20
FLAT = 0.5 * MEGABYTE
"""A change of memory over the second half of the long run that counts as none: the allocator moves by pages of this order."""


@dataclass(frozen=True)
class Target:
    """A target of the project, the measurement, and if it was reached (None: unknown)."""

    words: str
    figure: str
    reached: bool | None

    @property
    def row(self) -> str:
        verdict = {True: "reached", False: "**not reached**", None: "not measured"}[self.reached]
        return f"| {self.words} | {self.figure} | {verdict} |"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def with_spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, with the quartiles in brackets."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def turns(work: Mapping[str, Any], name: str, what: str = "turns") -> list[float]:
    """The turns of a contender; none when it is absent."""
    record = work["contenders"].get(name, {})
    return [] if "absent" in record else list(record.get(what, []))


def ratios(work: Mapping[str, Any], name: str, to: str, what: str = "turns") -> list[float]:
    """A contender's turns over another's, turn by turn."""
    return [mine / theirs for mine, theirs in zip(turns(work, name, what), turns(work, to, what), strict=False) if theirs]


def fastest(work: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The one of these with the lowest median."""
    present = [name for name in names if turns(work, name)]
    return min(present, key=lambda name: statistics.median(turns(work, name)), default=None)


def speed_table(work: Mapping[str, Any]) -> Iterator[str]:
    """All contenders of a work."""
    yield "| contender | seconds a round: median (quartiles) | ratio to the loop | processor time, ratio to the loop | first round ended after | compiling | peak memory |"
    yield "|---|---|---|---|---|---|---|"
    for name, record in work["contenders"].items():
        title = CONTENDERS[name].title if name in CONTENDERS else name
        if "absent" in record:
            yield f"| {title} | {record['absent']} | | | | | |"
            continue
        to_loop, processor = ratios(work, name, "loop"), ratios(work, name, "loop", "processor")
        cells = (
            with_spread(record["turns"], 3),
            with_spread(to_loop) if to_loop else "",
            f"{statistics.median(processor):.2f}" if processor else "",
            f"{record['first_round_ended_after']:.1f} s",
            compiling(name, record),
            f"{record['memory'] / MEGABYTE:,.0f} MB",
        )
        yield f"| {title} | {' | '.join(cells)} |"


def compiling(name: str, record: Mapping[str, Any]) -> str:
    """Describe how much longer the first round took for contenders that compile."""
    if name not in CONTENDERS or CONTENDERS[name].options.get("compile") != "on":
        return ""
    text = f"{record['first_round'] - statistics.median(record['turns']):.0f} s"
    cached = record.get("first_round_ended_after_with_cache")
    return text if cached is None else f"{text}; from its cache the first round ended after {cached:.1f} s"


def at_most(words: str, values: Sequence[float], limit: float) -> Target:
    """A ratio that must not exceed a limit."""
    if not values:
        return Target(words, "", None)
    return Target(words, with_spread(values), statistics.median(values) <= limit)


def at_least(words: str, values: Sequence[float], limit: float, by: str | None) -> Target:
    """A ratio that must reach a limit."""
    if not values or by is None:
        return Target(words, "", None)
    return Target(words, f"{with_spread(values)}, by {CONTENDERS[by].title}", statistics.median(values) >= limit)


def speed_targets(works: Mapping[str, Any]) -> Iterator[Target]:
    """The targets of works (a) to (d)."""
    for letter in ("b", "d"):
        work = works.get(letter)
        if work is not None:
            yield at_most(f"({letter}) in process, at most 1.03 of the loop", ratios(work, "polyfed", "loop"), 1.03)
            two = ratios(work, "polyfed_2_threads", "loop_2_threads")
            yield at_most(f"({letter}) in process with 2 threads, at most 1.03 of the loop with 2 threads", two, 1.03)
            limit = {"b": 0.68, "d": 0.60}[letter]
            yield at_most(f"({letter}) 2 workers, at most {limit:.2f} of the loop", ratios(work, "workers", "loop"), limit)
    for letter in ("a", "c"):
        if letter in works:
            yield from small_targets(letter, works[letter])


def small_targets(letter: str, work: Mapping[str, Any]) -> Iterator[Target]:
    """The targets of a work with small clients: against pfl-research and Flower."""
    ours = [name for name, contender in CONTENDERS.items() if contender.side == "side_polyfed"]
    best = fastest(work, ours)
    pfl = fastest(work, ("pfl", "pfl_2_threads"))
    if best and pfl:
        words = f"({letter}) at least 1.8 times the rounds per second of pfl-research at its best thread count"
        yield at_least(words, ratios(work, pfl, best), 1.8, best)
        words = f"({letter}) 2 workers, not compiled, at least 1.3 times pfl-research at its best thread count"
        yield at_least(words, ratios(work, pfl, "workers"), 1.3, "workers")
    if best and turns(work, "pfl_2_processes"):
        words = f"({letter}) the same against pfl-research in 2 processes (not in the issue)"
        yield at_least(words, ratios(work, "pfl_2_processes", best), 1.8, best)
    if best and turns(work, "flower"):
        yield at_least(f"({letter}) at least 2.5 times Flower's simulation", ratios(work, "flower", best), 2.5, best)
        slow = work["contenders"]["flower"]["first_round_ended_after"]
        for name in ("polyfed", "workers", "fused"):
            if turns(work, name):
                shorter = slow / work["contenders"][name]["first_round_ended_after"]
                words = f"({letter}) {CONTENDERS[name].title}: first finished round at least 3 times sooner than Flower's"
                yield Target(words, f"{shorter:.1f}", shorter >= 3)


def growth_targets(growth: Mapping[str, Any]) -> Iterator[Target]:
    """The targets of growth."""
    if "clients" in growth:
        counts = growth["clients"]["counts"]
        least, most = min(counts, key=int), max(counts, key=int)
        times = [a / b for a, b in zip(cost_of_rounds(counts[most]), cost_of_rounds(counts[least]), strict=True)]
        words = f"a round does not cost more with {int(most):,} clients than with {int(least):,} (median ratio at most 1.05)"
        yield at_most(words, times, 1.05)
        grown = counts[most]["grown"] / counts[most]["local"]
        words = f"memory for {int(most):,} idle clients, less than 2 times their local entries"
        yield Target(words, f"{grown:.2f} times", grown < 2)
    if "rounds" in growth:
        run = growth["rounds"]
        change = run["bytes_a_round"] * run["rounds"] / 2
        words = f"no growth over {run['rounds']} rounds (second half, by a line: less than {FLAT / MEGABYTE:.1f} MB)"
        yield Target(words, f"{change / MEGABYTE:+.2f} MB", change < FLAT)


def cost_of_rounds(facts: Mapping[str, Any]) -> Sequence[float]:
    """Processor seconds of rounds; where those were not taken, seconds on the clock."""
    found: Sequence[float] = facts.get("processor", facts["rounds"])
    return found


def growth_tables(everything: Mapping[str, Any]) -> Iterator[str]:
    """Clients and model sizes."""
    growth, sizes = everything.get("growth", {}), everything.get("sizes", {})
    if "clients" in growth:
        yield "## (e) Growth with the number of clients: fedbn, 10 a round, two steps of batch 4"
        yield ""
        yield "| clients | seconds a round: median (quartiles) | processor seconds a round | memory grown when all hold local entries | their local entries |"
        yield "|---|---|---|---|---|"
        for count, facts in growth["clients"]["counts"].items():
            grown, local = facts["grown"] / MEGABYTE, facts["local"] / MEGABYTE
            processor = with_spread(facts["processor"], 4) if "processor" in facts else "not measured"
            yield f"| {int(count):,} | {with_spread(facts['rounds'], 4)} | {processor} | {grown:.2f} MB | {local:.2f} MB |"
        yield from ("", provenance(growth["clients"]), "")
    if sizes:
        yield "## (e) Growth with the size of the model: 4 clients, one step of 2 samples, so that moving the state dominates"
        yield ""
        names = list(next(iter(sizes.values()))["contenders"])
        yield "| parameters | " + " | ".join(f"{CONTENDERS[name].title}: seconds, ratio, peak memory" for name in names) + " |"
        yield "|---" * (len(names) + 1) + "|"
        for facts in sizes.values():
            yield f"| {facts['parameters']:,} | " + " | ".join(size_cell(facts, name) for name in names) + " |"
        yield from ("", provenance(next(iter(sizes.values()))), "")


def size_cell(facts: Mapping[str, Any], name: str) -> str:
    """Seconds, ratio and memory of one contender at one size."""
    record = facts["contenders"].get(name, {"absent": "not run"})
    if "absent" in record:
        return str(record["absent"])
    seconds, ratio = statistics.median(record["turns"]), ratios(facts, name, "loop")
    return f"{seconds:.4f} s, {statistics.median(ratio):.2f}, {record['memory'] / MEGABYTE:,.0f} MB"


def provenance(facts: Mapping[str, Any]) -> str:
    """Return the source of a table."""
    measured = facts["measured"]
    quick = " **Quick check with tiny sizes: not a result.**" if facts.get("quick") else ""
    return (
        f"`{measured['command']}`, commit {measured['commit']}, {measured['date']}, load before {measured['load_before']}.{quick}"
    )


def document(everything: Mapping[str, Any]) -> str:
    """The whole text."""
    speed = everything.get("speed", {})
    parts = [part for group in ("speed", "growth", "sizes") for part in everything.get(group, {}).values()]
    lines = [
        "# Speed",
        "",
        "Written by `benchmarks/write_results.py` from `benchmarks/results.json`; measured by `make bench`.",
        "",
    ]
    if parts:
        measured = parts[-1]["measured"]
        lines += [f"Machine: {measured['machine']}.", ""]
        lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in measured["versions"].items()) + ".", ""]
    targets = [*speed_targets(speed), *growth_targets(everything.get("growth", {}))]
    if targets:
        lines += ["## Targets", "", "| target | measured | verdict |", "|---|---|---|", *(target.row for target in targets), ""]
    for letter, work in speed.items():
        rounds = f"{work['repeats']} turns of {work['rounds_a_turn']} round{'s' * (work['rounds_a_turn'] > 1)} each"
        lines += [f"## ({letter}) {work['title']}", "", *speed_table(work), "", f"{rounds}. {provenance(work)}", ""]
    lines += [*growth_tables(everything), *HOW, *waking(speed), ""]
    return "\n".join([*lines, *profiles()]).rstrip() + "\n"


HOW = (
    "## How it was measured",
    "",
    "* Each contender is a process of its own with one thread unless it says otherwise; it prepares once and runs a round when told.",
    "  Turns are interleaved (A B C ... A B C ...), one contender at a time.",
    "* The same work: model and initial values, arrays, batch sizes, number of steps, shuffling, preparation of batches, SGD, mean weighted by samples.",
    "  Nobody evaluates, nobody writes checkpoints. A ratio is taken turn by turn, then the median and quartiles of the ratios.",
    "* pfl-research is stepped by a callback at the end of an iteration, Flower by its `evaluate_fn`, polyfed by an observer.",
    "* Differences that could not be removed: pfl-research neither averages nor resets the buffers of batch norm (less work) and takes users in turn;",
    "  Flower's server looks for replies every 0.1 s and its actors keep model and data resident here, which its examples do not; Flower picks clients at random.",
    "* Time to the first finished round counts from the start of the process: imports, data, preparation, for compiled contenders also compiling, with an empty cache.",
    "* Peak memory is the sum of the resident memory of the process tree, looked at four times a second in the rounds before those that count (looking costs time) and after each round; shared pages count once for each process.",
)


def waking(speed: Mapping[str, Any]) -> Iterator[str]:
    """Describe the effect of stopping contenders between short turns."""
    yield "* Between their turns contenders are stopped, with all their processes (SIGSTOP), so that nobody's polling or spinning threads cost anybody else time."
    reason = "  Processes wake slowly from that, so short turns suffer"
    rounds = {letter: work["rounds_a_turn"] for letter, work in speed.items() if work["rounds_a_turn"] > 1}
    told = ", ".join(f"a turn of ({letter}) has {count} rounds" for letter, count in rounds.items())
    yield f"{reason}{f'; that is why {told}, of which the mean counts' if told else ''}."


def profiles() -> Iterator[str]:
    """Summarise the profiles and their sources."""
    found = sorted(PROFILES.glob("*.txt"))
    if found:
        yield from ("## Profiles", "", "Where the time of a round goes; the tables are in the files.", "")
    for path in found:
        origin, said, *_ = path.read_text().split("\n\n")
        yield f"* [{path.name}](profiles/{path.name}): {said} `{origin}`"


def main() -> None:
    write_page(__doc__ or "", document, DATA, TEXT, "make bench")


if __name__ == "__main__":
    main()
