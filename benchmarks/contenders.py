"""The contenders of the benchmark: names, descriptions and processes. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOOP, POLYFED, PFL, FLOWER = "side_loop", "side_polyfed", "side_pfl", "side_flower"
"""Modules of this folder with a function ``run(work, contender, turns)``."""

SMALL, LARGE, ALL, SIZES = ("a", "c"), ("b", "d"), ("a", "b", "c", "d"), ("e1", "e2", "e3", "e4")


@dataclass(frozen=True)
class Contender:
    """One way to run a workload. ``options`` are settings of polyfed, or sizes for the side module."""

    name: str
    title: str
    side: str
    works: tuple[str, ...]
    threads: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    twice: bool = False
    """Measure the time to the first round a second time, with cached compiled code."""


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("loop", "hand-written loop, 1 thread", LOOP, ALL + SIZES),
        Contender("loop_2_threads", "hand-written loop, 2 threads", LOOP, ALL, threads=2),
        Contender("polyfed", "polyfed, in process", POLYFED, ALL + SIZES),
        Contender("polyfed_2_threads", "polyfed, in process, 2 threads", POLYFED, LARGE, threads=2),
        Contender("workers", "polyfed, 2 workers", POLYFED, ALL + SIZES, options={"workers": "2"}),
        Contender("fused", "polyfed, fused", POLYFED, SMALL, options={"backend": "fused"}),
        Contender("fused_2_threads", "polyfed, fused, 2 threads", POLYFED, SMALL, threads=2, options={"backend": "fused"}),
        Contender("fused_workers", "polyfed, fused, 2 workers", POLYFED, SMALL, options={"backend": "fused", "workers": "2"}),
        Contender(
            "fused_compiled", "polyfed, fused, compiled", POLYFED, SMALL, options={"backend": "fused", "compile": "on"}, twice=True
        ),
        Contender(
            "fused_compiled_2_threads",
            "polyfed, fused, compiled, 2 threads",
            POLYFED,
            SMALL,
            threads=2,
            options={"backend": "fused", "compile": "on"},
        ),
        Contender(
            "fused_workers_compiled",
            "polyfed, fused, 2 workers, compiled",
            POLYFED,
            SMALL,
            options={"backend": "fused", "workers": "2", "compile": "on"},
        ),
        Contender(
            "workers_compiled",
            "polyfed, 2 workers, compiled",
            POLYFED,
            LARGE,
            options={"workers": "2", "compile": "on"},
            twice=True,
        ),
        Contender("pfl", "pfl-research, 1 thread", PFL, ALL),
        Contender("pfl_2_threads", "pfl-research, 2 threads", PFL, ALL, threads=2),
        Contender("pfl_2_processes", "pfl-research, 2 processes", PFL, SMALL, options={"processes": "2"}),
        Contender("flower", "Flower simulation, 2 actors", FLOWER, ALL, options={"actors": "2"}),
    )
}


def taking_part(work: str, names: str = "") -> list[Contender]:
    """Return the contenders of a workload: all suitable ones, or those in a comma-separated list."""
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"There is no contender {unknown[0]!r}. Choose from: {', '.join(CONTENDERS)}.")
    return [contender for contender in CONTENDERS.values() if work in contender.works and (not wanted or contender.name in wanted)]
