"""Profile a round, and write summaries to benchmarks/profiles/: torch's profiler for operators, cProfile for Python.

Run: benchmarks/.venv/bin/python benchmarks/profile_round.py      (or: ... --only a-fused,b-polyfed)

Each case warms up for a round, then runs some rounds untouched, some under torch's profiler and some under cProfile. Large works are
cut in the number of clients and samples, never in the size of a step, so that everything ends within three minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import processes
import torch
from contenders import CONTENDERS, Contender
from results import circumstances
from side_polyfed import require_own_path, settings_for
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from turns import CannotTakePart
from works import Work, build_model, chosen, federation
from write_results import PROFILES

import polyfed
from polyfed.core.server import Server
from polyfed.runs.experiment import Experiment
from polyfed.runs.malloc import keep_freed_pages

OTHER, PYTHON = "other operators (batches, copies, gradients, the mean)", "Python outside operators"
KINDS = {
    "the optimizer": ("optimizer.",),
    "convolution": ("conv",),
    "batch norm": ("batch_norm", "batchnorm"),
    "linear layers": ("linear", "mm"),
    "pooling, activation and loss": ("pool", "relu", "threshold", "clamp_min", "softmax", "nll_loss", "cross_entropy"),
}
"""Operators by what their names hold; an operator that fits none counts with the one that called it."""
TORCH, POLYFED, WAITING, REST = (
    "torch's operators",
    "polyfed's Python",
    "waiting for workers",
    "the rest (pipes, JSON, Python's own modules)",
)
TORCH_PYTHON = "torch's Python"
HOMES = {POLYFED: Path(polyfed.__file__).parent, TORCH_PYTHON: Path(torch.__file__).parent}
ROWS = 15

Function: TypeAlias = "tuple[str, int, str]"
Shares: TypeAlias = "dict[str, float]"


@dataclass(frozen=True)
class Case:
    """A workload of a contender, limited to some clients and samples, with the number of rounds to profile."""

    letter: str
    contender: str
    rounds: int
    cut: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.letter}-{self.contender}"

    def work(self, quick: bool) -> Work:
        """The work as it is run here."""
        return chosen(self.letter, quick) if quick else dataclasses.replace(chosen(self.letter), **self.cut)

    def size(self, work: Work) -> str:
        """Describe what was omitted."""
        whole = chosen(self.letter)
        left = (f"{work.a_round} clients a round", f"{work.samples} samples each")
        return f" (here with {left[0]} and {left[1]})" if (work.a_round, work.samples) != (whole.a_round, whole.samples) else ""


CASES = (
    Case("a", "polyfed", 1),
    Case("b", "polyfed", 1, {"clients": 2, "a_round": 2, "samples": 256}),
    Case("c", "polyfed", 1, {"clients": 100, "a_round": 10}),
    Case("d", "polyfed", 1, {"clients": 2, "a_round": 2, "samples": 128}),
    Case("a", "fused", 2),
    Case("c", "fused", 1),
    Case("a", "workers", 6),
)


class Watch:
    """Looks at rounds in several ways, one after the other; called by polyfed at the end of each round."""

    def __init__(self, rounds: int, operators: bool) -> None:
        self.rounds = rounds
        self.looks = ("plain", "operators", "python") if operators else ("plain", "python")
        self.last = 1 + len(self.looks) * rounds
        self.seconds: dict[str, float] = {}
        self.operators = profile(activities=[ProfilerActivity.CPU])
        self.python = cProfile.Profile()
        self.own = self.workers = 0.0
        self.began = 0.0

    def __call__(self, server: Server) -> None:
        number, within = divmod(server.round - 1, self.rounds)
        if server.round == 0 or within:
            return
        if number > 0:
            self.end(self.looks[number - 1])
        if number < len(self.looks):
            self.begin(self.looks[number])

    def begin(self, look: str) -> None:
        """Start one way of looking."""
        if look == "plain":
            self.own -= time.process_time()
            self.workers -= processor_seconds_of_children()
        elif look == "operators":
            self.operators.start()
        else:
            self.python.enable()
        self.began = time.perf_counter()

    def end(self, look: str) -> None:
        """End it, and note how long its rounds took."""
        self.seconds[look] = time.perf_counter() - self.began
        if look == "plain":
            self.own += time.process_time()
            self.workers += processor_seconds_of_children()
        elif look == "operators":
            self.operators.stop()
        else:
            self.python.disable()


def processor_seconds_of_children() -> float:
    """Processor time used so far by processes that this one started."""
    return processes.processor_seconds(pid for pid in processes.tree(os.getpid()) if pid != os.getpid())


@functools.cache
def kind_named(name: str) -> str | None:
    """Return the category of an operator by its name."""
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), None)


def kind_of(event: FunctionEvent) -> str:
    """Return the category of an operator by its name or its callers' names."""
    at: FunctionEvent | None = event
    while at is not None:
        found = kind_named(at.name)
        if found is not None:
            return found
        at = at.cpu_parent
    return OTHER


def by_operator(events: Iterable[FunctionEvent], seconds: float) -> Shares:
    """The shares of the time that went to each kind of operator; what is left was Python's."""
    own: Counter[str] = Counter()
    for event in events:
        own[kind_of(event)] += event.self_cpu_time_total / 1e6
    shares = {kind: own[kind] / seconds for kind in (*KINDS, OTHER)}
    return shares | {PYTHON: max(0.0, 1 - sum(shares.values()))}


def owner_of(function: Function) -> str:
    """Return the owner of a function; empty for Python's functions, which count for their callers."""
    file, _, name = function
    if file == "~":
        return WAITING if "select." in name else TORCH if "torch" in name else ""
    return next((owner for owner, home in HOMES.items() if Path(file).is_relative_to(home)), REST)


def by_owner(statistics: pstats.Stats) -> Shares:
    """The shares of the time that went to each owner's code."""
    own: Counter[str] = Counter()
    for function, (_, _, seconds, _, callers) in statistics.stats.items():  # type: ignore[attr-defined]
        owner = owner_of(function)
        if owner:
            own[owner] += seconds
            continue
        for caller, (_, _, part, _) in callers.items():
            own[owner_of(caller) or REST] += part
    total = sum(own.values())
    return {owner: own[owner] / total for owner in (WAITING, TORCH, POLYFED, TORCH_PYTHON, REST)}


def percent(share: float) -> str:
    """A share in words that do not call a small one nothing."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def join_items(shares: Shares) -> str:
    """Shares from the largest to the smallest."""
    return ", ".join(
        f"{percent(share)} {name}" for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.0005
    )


def words(beginning: str, watch: Watch, operators: Shares | None, owners: Shares) -> str:
    """Summarise the profile."""
    seconds, processor = watch.seconds["plain"] / watch.rounds, (watch.own + watch.workers) / watch.rounds
    said = [f"{beginning}: {seconds:.2f} s a round, {processor:.2f} s of CPU time."]
    if operators is None:
        working = {name: share for name, share in owners.items() if name != WAITING}
        busy = watch.workers / watch.seconds["plain"]
        said += [
            f"The parent waits for its workers {percent(owners[WAITING])} of the time and works {percent(sum(working.values()))}:",
            f"{join_items(working)}.",
            f"Its workers together used {busy:.2f} s of CPU time for each second of the round.",
        ]
    else:
        network = sum(share for kind, share in operators.items() if kind not in ("the optimizer", OTHER, PYTHON))
        said += [
            f"The network's arithmetic takes {percent(network)} of the time, the optimizer {percent(operators['the optimizer'])}.",
            f"By kind: {join_items(operators)}.",
            f"Python is at most {percent(owners[POLYFED])} polyfed's own and {percent(owners[TORCH_PYTHON])} torch's (cProfile, which slows Python down).",
        ]
    return " ".join(said)


def operator_rows(events: Iterable[FunctionEvent], seconds: float) -> Iterator[str]:
    """The operators that took most time themselves."""
    own: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        own[event.name] += event.self_cpu_time_total / 1e6
        calls[event.name] += 1
    yield f"{'share':>7} {'seconds':>9} {'calls':>8}  operator (own time, torch's profiler)"
    for name, taken in own.most_common(ROWS):
        yield f"{taken / seconds:7.1%} {taken:9.4f} {calls[name]:8,}  {name[:90]}"


def python_rows(statistics: pstats.Stats) -> Iterator[str]:
    """The functions that took most time themselves."""
    table = statistics.stats  # type: ignore[attr-defined]
    total = sum(row[2] for row in table.values())
    yield f"{'share':>7} {'seconds':>9} {'calls':>8}  function (own time, cProfile)"
    for function, (_, calls, seconds, _, _) in sorted(table.items(), key=lambda item: -item[1][2])[:ROWS]:
        yield f"{seconds / total:7.1%} {seconds:9.4f} {calls:8,}  {called(function)[:90]}"


def called(function: Function) -> str:
    """A function by file and name, without the folders of this machine."""
    file, line, name = function
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


def profiled(case: Case, work: Work, contender: Contender) -> str:
    """Run a case; returns its words and its tables."""
    watch = Watch(case.rounds, operators="workers" not in contender.options)
    settings = settings_for(work, watch.last, contender.threads, **contender.options)
    experiment = Experiment(settings, federation(work), "fedavg", build_model(work))
    require_own_path(experiment, dict(contender.options))
    experiment.train([watch])
    experiment.backend.close()
    statistics = pstats.Stats(watch.python)
    tables = [[f"{share:7.1%}  {name}" for name, share in by_owner(statistics).items()], [*python_rows(statistics)]]
    operators: Shares | None = None
    if "operators" in watch.looks:
        events, seconds = list(watch.operators.events() or ()), watch.seconds["operators"]
        operators = by_operator(events, seconds)
        tables[:0] = [[f"{share:7.1%}  {name}" for name, share in operators.items()], [*operator_rows(events, seconds)]]
    beginning = f"Work ({work.letter}), {contender.title}{case.size(work)}"
    return "\n\n".join([words(beginning, watch, operators, by_owner(statistics)), *("\n".join(table) for table in tables)]) + "\n"


def head(measured: Mapping[str, Any]) -> str:
    """Return the source of a profile."""
    versions = measured["versions"]
    return (
        f"{measured['command']}, commit {measured['commit']}, {measured['date']}, load before {measured['load_before']}, "
        f"torch {versions['torch']}, {measured['machine']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only checks that everything runs")
    parser.add_argument("--only", default="", help="names such as b-polyfed, with commas")
    parser.add_argument("--out", type=Path, default=PROFILES)
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    unknown = [name for name in wanted if name not in [case.name for case in CASES]]
    if unknown:
        raise SystemExit(f"There is no profile {unknown[0]!r}. Choose from: {', '.join(case.name for case in CASES)}.")
    torch.set_num_threads(1)
    keep_freed_pages()  # as the command line does
    options.out.mkdir(exist_ok=True)
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        try:
            text = profiled(case, case.work(options.quick), CONTENDERS[case.contender])
        except CannotTakePart as error:
            print(f"{case.name}: {error}")
            continue
        (options.out / f"{case.name}.txt").write_text(f"{head(circumstances(sys.argv))}\n\n{text}")
        print(text.split("\n\n", 1)[0], flush=True)


if __name__ == "__main__":
    main()
