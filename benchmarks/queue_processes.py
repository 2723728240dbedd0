"""The processes of the queue: one starts the others, which train one run each. Each may be killed at any time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from queue_list import Expanded, Job, expand, read_list

from polyfed.errors import PolyfedError, RunFolderError, SettingError
from polyfed.papers.ledger import DIVERGED, FINISHED, Ledger, read_record, require_portable, write_record
from polyfed.papers.recording import train_recorded
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.result import Result
from polyfed.settings import Settings

PUBLISHED = Path("docs") / "results"
"""The repository's results: runs and logs of rate searches in it count as finished."""
RATES = "rates"
MAX_KILLS = 3
"""Number of times that a run may be killed before the queue skips it."""
WAIT = 2.0
PARENT_DEATH_SIGNAL = 1
"""Option of prctl: the signal that a process receives when its parent ends."""
NICE = 19
OF_JOB = ".job.json"
"""Suffix of the file with the job of a process."""


@dataclass(frozen=True)
class Results:
    """The folder of results, and the paths in it."""

    path: Path

    @property
    def ledger(self) -> Path:
        """Records of finished runs."""
        return self.path / "ledger"

    def state(self, key: str) -> Path:
        """State of a job: round, CPU seconds, kills, error."""
        return self.path / "jobs" / f"{key}.json"

    def log(self, key: str) -> Path:
        """Output of a job."""
        return self.path / "logs" / f"{key}.log"

    def read_state(self, key: str) -> dict[str, Any]:
        """Return the state of a job; empty before it starts."""
        try:
            found: dict[str, Any] = json.loads(self.state(key).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found

    def write_state(self, key: str, **values: Any) -> None:
        """Update the state of a job."""
        path = self.state(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**self.read_state(key), **values}), sync=False)

    def cores(self, default: int) -> int:
        """Return the maximum number of processes, set by ``queue cores`` or at the start."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.path / "cores").read_text())
        return default


def outcome(job: Job, results: Results, known: Ledger) -> str:
    """Return how a job ended: finished, diverged or failed; empty if it must run."""
    state = results.read_state(job.key)
    if job.settings is None:
        return FINISHED if job.has_log else str(state.get("outcome", ""))
    record = known.exact(job.settings).get(job.settings.seed)
    if record is not None and (record.state == DIVERGED or set(job.analyses) <= set(record.analyses)):
        return record.state
    return "failed" if state.get("outcome") == "failed" else ""


# ------------------------------------------------------------------------------------------------------------- one run


class Progress(Callback):
    """Writes the round and the CPU seconds of a job to its state file."""

    def __init__(self, results: Results, key: str) -> None:
        self.results, self.key, self.before = results, key, float(results.read_state(key).get("cpu_seconds", 0.0))

    def begin(self, run: RunState) -> None:
        self.label = run.label
        print(run.label, flush=True)

    def after_round(self, run: RunState) -> None:
        self.results.write_state(self.key, round=run.round, rounds=run.rounds, cpu_seconds=self.spent())

    def spent(self) -> float:
        """Return the CPU seconds of all processes of this job."""
        return self.before + time.process_time()

    def end(self, result: Result) -> None:
        print(f"{self.label}: {result.words}", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


def end_with_parent(parent: int) -> None:
    """End this process when the queue ends for any reason, so that two processes never train the same run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("The queue ended before this run started.")


def work(file: Path, results: Results, parent: int) -> int:
    """Train one run and write its record, or become the command of an entry; an error is stored in the state of the job."""
    end_with_parent(parent)
    job = json.loads(file.read_text(encoding="utf-8"))
    if "command" in job:
        os.execvp(job["command"][0], job["command"])
    progress = Progress(results, job["key"])
    try:
        # The queue runs one job per core.
        settings = dataclasses.replace(Settings.from_dict(job["settings"], job["key"]), workers="1")
        record = train_recorded(settings, results.path / "runs", job["analyses"], [progress])
        write_record(results.ledger, record)
    except PolyfedError as error:
        print(f"Failed: {error}", flush=True)
        results.write_state(job["key"], outcome="failed", error=str(error), cpu_seconds=progress.spent())
        return 0
    results.write_state(job["key"], outcome=record.state, cpu_seconds=progress.spent())
    return 0


# ------------------------------------------------------------------------------------------------------------- the queue


@dataclass
class Running:
    """A process of the queue."""

    job: Job
    process: subprocess.Popen[bytes]
    started: float


class Queue:
    """Runs the list: starts processes, records how they end, and writes progress."""

    def __init__(self, results: Results, listed: Path, root: str, cores: int, script: Path, commit: str = "") -> None:
        self.results, self.listed, self.root, self.cores = results, listed, root, cores
        self.script, self.commit = script, commit
        self.running: list[Running] = []
        self.read_at: tuple[float, ...] = ()
        self.expanded = Expanded()
        self.known = Ledger([])
        self.files: dict[str, Path] = {}

    def look(self) -> None:
        """Read the list again if it or the log of a rate search changed, and the ledger if it grew."""
        published = self.script.parent.parent / PUBLISHED
        changed = tuple(path.stat().st_mtime for path in (self.listed, *sorted(self.results.path.glob(f"{RATES}/*.json"))))
        if changed != self.read_at:
            self.read_at = changed
            try:
                self.expanded = expand(read_list(self.listed), self.root, (published, self.results.path))
            except (tomllib.TOMLDecodeError, SettingError) as error:
                if not self.expanded.jobs:
                    raise
                print(f"Cannot read {self.listed}; keeping the previous list: {error}", flush=True)
            for name, problem in self.expanded.problems.items():
                print(f"{name}: {problem}", flush=True)
        folders = (published / "runs", self.results.ledger)
        files = {path.name: path for folder in folders for path in sorted(folder.glob("*.json"))}
        if files != self.files:
            self.files, self.known = files, Ledger(map(read_record, files.values()))

    def waiting(self) -> list[Job]:
        """Return the jobs to run, in order."""
        busy = {one.job.key for one in self.running}
        return [job for job in self.expanded.jobs if job.key not in busy and not outcome(job, self.results, self.known)]

    def run(self) -> None:
        """Run until no job is left."""
        try:
            while True:
                self.look()
                self.reap()
                waiting = self.waiting()
                while waiting and len(self.running) < self.results.cores(self.cores):
                    self.start(waiting.pop(0))
                self.write_progress(waiting)
                if not self.running and not waiting:
                    return
                time.sleep(WAIT)
        finally:
            for one in self.running:
                one.process.terminate()
                one.process.wait()

    def start(self, job: Job) -> None:
        """Start the process of a job."""
        self.results.write_state(job.key, entry=job.entry, round=0)
        todo: dict[str, Any] = {"key": job.key}
        if job.settings is not None:
            todo |= {"settings": job.settings.to_dict(), "analyses": list(job.analyses)}
        else:
            places = {"python": sys.executable, "root": self.root, "results": str(self.results.path)}
            todo["command"] = [word.format(**places) for word in shlex.split(job.command)]
        file = self.results.path / "jobs" / f"{job.key}{OF_JOB}"
        write_atomically(file, json.dumps(todo))
        words = [sys.executable, str(self.script), "work", str(file), "--results", str(self.results.path)]
        words += ["--parent", str(os.getpid())]
        log = self.results.log(job.key)
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with log.open("ab") as file_of_log:
            process = subprocess.Popen(
                ["nice", "-n", str(NICE), *words],
                stdout=file_of_log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads},
                cwd=self.script.parent.parent,
            )
        self.running.append(Running(job, process, time.time()))

    def reap(self) -> None:
        """Record how processes ended. A run that was killed is retried a limited number of times."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            key, code = one.job.key, one.process.returncode
            if one.job.settings is None and code >= 0:
                spent = float(self.results.read_state(key).get("cpu_seconds", 0.0)) + time.time() - one.started
                self.results.write_state(
                    key, outcome=FINISHED if code == 0 else "failed", cpu_seconds=spent, error=f"exit code {code}"
                )
            elif code != 0:  # a command that was killed starts again as well, since it resumes
                kills = int(self.results.read_state(key).get("kills", 0)) + 1
                self.results.write_state(key, kills=kills)
                if code > 0 or kills >= MAX_KILLS:
                    why = f"exit code {code}; see {self.results.log(key).relative_to(self.results.path)}"
                    self.results.write_state(key, outcome="failed", error=why)
        self.look()

    def write_progress(self, waiting: list[Job]) -> None:
        """Write progress.json and progress.txt."""
        found = progress_of(self, waiting)
        write_atomically(self.results.path / "progress.json", json.dumps(found, indent=1) + "\n", sync=False)
        write_atomically(self.results.path / "progress.txt", progress_words(found), sync=False)


def progress_of(queue: Queue, waiting: list[Job]) -> dict[str, Any]:
    """Return the state of the queue as plain values."""
    results = queue.results
    ended = {job.key: outcome(job, results, queue.known) for job in queue.expanded.jobs}
    states = {job.key: results.read_state(job.key) for job in queue.expanded.jobs}
    costs: dict[str, list[float]] = {}
    for record in queue.known.records:
        if record.state == FINISHED and record.cost.get("cpu_seconds"):
            costs.setdefault(record.identity, []).append(float(record.cost["cpu_seconds"]))

    def seconds(job: Job) -> float | None:
        mine = costs.get(job.identity)
        return sum(mine) / len(mine) if mine else job.seconds

    left = [seconds(job) for job in waiting]
    running = []
    for one in queue.running:
        state = states[one.job.key]
        running.append({"run": one.job.key, "entry": one.job.entry, "round": state.get("round", 0), "rounds": state.get("rounds")})
        whole, done = seconds(one.job), state.get("round", 0) / (state.get("rounds") or 1)
        left.append(None if whole is None else whole * (1 - done))
    return {
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": queue.commit,
        "cores": results.cores(queue.cores),
        "runs": len(ended),
        "finished": sum(each == FINISHED for each in ended.values()),
        "diverged": [key for key, each in ended.items() if each == DIVERGED],
        "failed": {key: states[key].get("error", "") for key, each in ended.items() if each == "failed"},
        "not_expanded": queue.expanded.problems,
        "running": running,
        "left": len(waiting),
        "core_hours_left": round(sum(each or 0.0 for each in left) / 3600, 2),
        "left_without_estimate": sum(each is None for each in left),
        "core_hours_spent": round(sum(float(state.get("cpu_seconds", 0.0)) for state in all_states(results)) / 3600, 2),
        "next": [job.key for job in waiting[:5]],
    }


def all_states(results: Results) -> Iterator[dict[str, Any]]:
    """Return the state of every started job."""
    for path in sorted((results.path / "jobs").glob("*.json")):
        if not path.name.endswith(OF_JOB):
            yield json.loads(path.read_text(encoding="utf-8"))


def progress_words(found: dict[str, Any]) -> str:
    """Format the progress for people."""
    unknown = f" (and {found['left_without_estimate']} without an estimate)" if found["left_without_estimate"] else ""
    lines = [
        f"{found['updated']}  commit {found['commit'][:12] or 'unknown'}, {found['cores']} core{'s' * (found['cores'] != 1)}",
        f"finished {found['finished']}, diverged {len(found['diverged'])}, failed {len(found['failed'])}, "
        f"running {len(found['running'])}, left {found['left']}, of {found['runs']} runs",
        f"core-hours: spent {found['core_hours_spent']:.2f}, left about {found['core_hours_left']:.1f}{unknown}",
        *(f"running: {one['run']}, round {one['round']} of {one['rounds'] or '?'} ({one['entry']})" for one in found["running"]),
        *(f"diverged: {key}" for key in found["diverged"]),
        *(f"failed: {key}: {error}" for key, error in found["failed"].items()),
        *(f"not run: {name}: {error}" for name, error in found["not_expanded"].items()),
        *(f"next: {key}" for key in found["next"]),
    ]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def only_one(results: Results) -> Iterator[None]:
    """Lock the folder against a second queue. The lock ends with the process."""
    results.path.mkdir(parents=True, exist_ok=True)
    with (results.path / "queue.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"A queue already works on {results.path}. Look at benchmarks/queue status.") from None
        yield


def forget_failures(results: Results) -> None:
    """Schedule failed jobs again."""
    for path in (results.path / "jobs").glob("*.json"):
        if path.name.endswith(OF_JOB):
            continue
        state = json.loads(path.read_text(encoding="utf-8"))
        if state.pop("outcome", "") == "failed":
            write_atomically(path, json.dumps({**state, "kills": 0}), sync=False)


def import_ledger(results: Results, to: Path) -> list[str]:
    """Copy records to the repository's ledger. Existing records must have the same digest."""
    return [write_record(to, read_record(path)).name for path in sorted(results.ledger.glob("*.json"))]


def import_rates(results: Results, to: Path) -> list[str]:
    """Copy the logs of rate searches to the repository. Existing logs must be identical."""
    from choose_rate import log_problems  # loads Optuna, which processes that train do not need

    names = []
    for path in sorted(results.path.glob(f"{RATES}/*.json")):
        text = path.read_text(encoding="utf-8")
        log = json.loads(text)
        if problems := log_problems(log):
            raise RunFolderError(f"{path}: {' '.join(problems)}")
        require_portable(log, path.name)
        copy = to / path.name
        if copy.exists() and json.loads(copy.read_text(encoding="utf-8")) != log:
            raise RunFolderError(
                f"{path.name} exists in the repository with different content. Determine which one is correct, and remove the other."
            )
        to.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, text)
        names.append(path.name)
    return names
