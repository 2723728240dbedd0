"""The speed of a round: hand-written loop, polyfed's paths, pfl-research and Flower on the same work, interleaved.

Run: make bench      (or: benchmarks/.venv/bin/python benchmarks/bench_speed.py --works a,b,c,d --repeats 5)

Writes benchmarks/results.json; benchmarks/write_results.py makes benchmarks/results.md of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from contenders import SMALL, taking_part
from driver import measure
from results import DATA, put
from works import SPEED_WORKS, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join(SPEED_WORKS), help="letters of the works, with commas")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender that count")
    parser.add_argument("--contenders", default="", help="names, with commas; default: all that suit the work")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one repeat: only checks that everything runs")
    parser.add_argument("--out", type=Path, default=DATA, help="the data file")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    for letter in options.works.split(","):
        work = chosen(letter, options.quick)
        started = time.monotonic()
        found = measure(
            letter, taking_part(letter, options.contenders), work.warm_ups, repeats, work.rounds_a_turn, options.quick, report
        )
        facts = {"title": work.title, "quick": options.quick, "repeats": repeats, "rounds_a_turn": work.rounds_a_turn}
        facts |= {"contenders": found, "took": time.monotonic() - started, "small": letter in SMALL}
        put(options.out, "speed", letter, facts, sys.argv)


def report(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
