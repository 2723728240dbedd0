"""Start contenders, let them run rounds in turn, one at a time, and measure the times.

Every contender is put to sleep (SIGSTOP, its whole process tree) while another has its turn, so that no polling or spinning
threads cost anybody else time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import processes
from contenders import Contender

HERE = Path(__file__).resolve().parent
LONGEST_ROUND = 600.0
WAKING = 0.3
"""Seconds between resuming a contender and its round, so that pending work is not measured."""

Say = Callable[[str], None]


class Lost(Exception):
    """A contender failed; the message contains the reason."""


def environment(threads: int, cache: Path) -> dict[str, str]:
    """Return the environment of a contender: number of threads, separate cache for compiled code, no telemetry."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "XDG_CACHE_HOME": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    many = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    path = {"PYTHONPATH": str(HERE), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    return os.environ | quiet | caches | many | path


class Running:
    """A contender's process."""

    def __init__(self, work: str, contender: Contender, rounds: int, quick: bool, folder: Path) -> None:
        self.contender = contender
        self.rounds, self.done = rounds, 0
        self.log = folder / f"{work}-{contender.name}.log"
        command = [sys.executable, str(HERE / "contender.py"), work, contender.name, "--rounds", str(rounds)]
        cache = folder / "cache" / f"{work}-{contender.name}"
        cache.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command + ["--quick"] * quick,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(contender.threads, cache),
                start_new_session=True,
            )
        self.asleep: list[int] = []
        self.members = [self.process.pid]

    def round(self, watched: bool = False) -> dict[str, Any]:
        """Resume, run one round, and return its wall-clock and CPU seconds and its memory (peak if watched, otherwise at the end)."""
        if self.asleep:
            processes.signal_all(self.asleep, signal.SIGCONT)
            self.asleep = []
            time.sleep(WAKING)
        before = processes.processor_seconds(processes.tree(self.process.pid))
        with processes.PeakMemory(self.process.pid, watched) as memory:
            stdin = self.process.stdin
            assert stdin is not None
            try:
                stdin.write(b"go\n")
                stdin.flush()
            except BrokenPipeError as error:
                raise Lost(f"ended early: {self.last_output()}") from error
            message = self.message()
        self.members = processes.tree(self.process.pid)
        after = processes.processor_seconds(self.members)
        for reason in ("missing", "failed"):
            if reason in message:
                raise Lost(f"{reason}: {message[reason]}")
        self.done += 1
        return {"seconds": message["seconds"], "processor": after - before, "memory": memory.most}

    def message(self) -> dict[str, Any]:
        """The contender's next line."""
        stdout: IO[bytes] | None = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], LONGEST_ROUND)[0]:
            raise Lost(f"failed: no round ended within {LONGEST_ROUND:.0f} s")
        line = stdout.readline()
        if not line:
            raise Lost(f"failed: ended early: {self.last_output()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def last_output(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def sleep(self) -> None:
        """Stop the whole tree until the next round."""
        self.asleep = processes.tree(self.process.pid)
        processes.signal_all(self.asleep, signal.SIGSTOP)

    def close(self) -> None:
        """Wait for a contender that has run all its rounds, or else end it, with all processes of its tree."""
        processes.signal_all(self.asleep, signal.SIGCONT)
        members = set(self.members) | set(processes.tree(self.process.pid))
        if self.done < self.rounds:
            processes.signal_all(members, signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            processes.signal_all(members, signal.SIGKILL)
            self.process.wait()
        left = [pid for pid in members if pid != self.process.pid and was_started_here(pid)]
        processes.signal_all(left, signal.SIGKILL)


def was_started_here(pid: int) -> bool:
    """Return True if a process has the environment of a contender, because its id may have been reused."""
    try:
        return f"PYTHONPATH={HERE}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def measure(
    work: str, contenders: Sequence[Contender], warm_ups: int, repeats: int, a_turn: int, quick: bool, say: Say
) -> dict[str, Any]:
    """Run all contenders on one workload, interleaved. The first turn of each one measures the time to the first finished round."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found: dict[str, Any] = {}
    running: list[Running] = []
    rounds = warm_ups + repeats * a_turn
    with tempfile.TemporaryDirectory(prefix="polyfed-bench-") as place:
        folder = Path(place)
        try:
            for contender in contenders:
                started = start(work, contender, rounds, warm_ups, quick, folder, found, say)
                running += [started] if started is not None else []
            for repeat in range(1, repeats + 1):
                for one in list(running):
                    if not turn(one, a_turn, found[one.contender.name], say, f"{work} {repeat}/{repeats}"):
                        running.remove(one)
            for contender in contenders:
                if contender.twice and found[contender.name].get("turns"):
                    again(work, contender, quick, folder, found[contender.name], say)
        finally:
            for one in running:
                one.close()
    return found


def start(
    work: str, contender: Contender, rounds: int, warm_ups: int, quick: bool, folder: Path, found: dict[str, Any], say: Say
) -> Running | None:
    """Start a contender and run its warm-up rounds; None if it is not available."""
    one = Running(work, contender, rounds, quick, folder)
    record: dict[str, Any] = {"turns": [], "processor": [], "memory": 0}
    found[contender.name] = record
    try:
        first = one.round(watched=True)
        record["first_round_ended_after"] = time.monotonic() - one.started
        record["first_round"] = first["seconds"]
        record["memory"] = first["memory"]
        for _ in range(warm_ups - 1):
            record["memory"] = max(record["memory"], one.round(watched=True)["memory"])
    except Lost as error:
        found[contender.name] = {"absent": str(error)}
        say(f"{work} {contender.name}: {error}")
        one.close()
        return None
    one.sleep()
    say(f"{work} {contender.name}: first round ended after {record['first_round_ended_after']:.1f} s")
    return one


def turn(one: Running, a_turn: int, record: dict[str, Any], say: Say, when: str) -> bool:
    """Run one turn of one contender. Return False if it failed."""
    try:
        results = [one.round() for _ in range(a_turn)]
    except Lost as error:
        record["absent"] = str(error)
        say(f"{when} {one.contender.name}: {error}")
        one.close()
        return False
    one.sleep()
    record["turns"].append(statistics.fmean(result["seconds"] for result in results))
    record["processor"].append(statistics.fmean(result["processor"] for result in results))
    record["memory"] = max(record["memory"], *(result["memory"] for result in results))
    say(f"{when} {one.contender.name}: {record['turns'][-1]:.3f} s")
    return True


def again(work: str, contender: Contender, quick: bool, folder: Path, record: dict[str, Any], say: Say) -> None:
    """Measure the time to the first finished round with cached compiled code."""
    one = Running(work, contender, 1, quick, folder)
    try:
        one.round()
        record["first_round_ended_after_with_cache"] = time.monotonic() - one.started
        say(
            f"{work} {contender.name}: with its cache the first round ended after {record['first_round_ended_after_with_cache']:.1f} s"
        )
    except Lost as error:
        record["with_cache_absent"] = str(error)
    finally:
        one.close()
