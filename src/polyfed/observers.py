"""What happens beside training: progress, metrics, checkpoints. A run with a folder survives being killed at any instant.

A checkpoint is taken between two rounds and written while the next one trains. At most one is on its way; whatever ends the run
waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.beside import Beside
from polyfed.data.identity import identity_of
from polyfed.errors import RunFolderError
from polyfed.evaluation import Row
from polyfed.folder import RunFolder
from polyfed.meter import LEFT_BEHIND, Meter, trains_alone
from polyfed.newcomer_file import leave_newcomer
from polyfed.outline import outline_of
from polyfed.paths import on_this_machine
from polyfed.result import Result
from polyfed.run import Observer
from polyfed.selection import BEST_VALIDATION, BestValidation

log = logging.getLogger("polyfed")

OWN_CODE_AT_THE_SERVER = (
    "opening",
    "round",
    "outgoing",
    "briefing",
    "weighting",
    "server_step",
    "after_round",
    "before_evaluation",
    "newcomer",
    "uploads",
)
"""Slots whose code is given the server. Where they are empty, only the loop makes new state, and it replaces values."""

if TYPE_CHECKING:
    from polyfed.checkpoint import Snapshot
    from polyfed.client import Kept
    from polyfed.experiment import DeliveryFor, Experiment
    from polyfed.method import Method
    from polyfed.server import Server


@dataclasses.dataclass(frozen=True)
class OnItsWay:
    """A checkpoint that is being written: of which round, and what the delivery must know when it is there, or is not."""

    round: int
    changed: set[str]
    held: Mapping[str, Kept]


class Recorder:
    """Evaluates when it is time, writes metrics, then checkpoints: in this order, so that a checkpoint knows how many metrics belong to it."""

    def __init__(
        self, experiment: Experiment, folder: RunFolder | None, split: str = "test", best: Mapping[str, Any] | None = None
    ) -> None:
        self.experiment, self.folder, self.split = experiment, folder, split
        self.selection: BestValidation | None = None
        if experiment.settings.selection == BEST_VALIDATION:
            self.selection = BestValidation(experiment, None if folder is None else folder.best, best)
        self.last_saved = time.monotonic()
        self.beside = Beside()
        self.on_its_way: OnItsWay | None = None
        self.saved = -1
        self.copied_bytes = 0
        self.meter = Meter(alone=trains_alone(experiment.settings), beside=lambda: self.beside.cpu_seconds)
        # A run that was stopped after its last round was scored, and before its end, has these scores already.
        number, is_last = experiment.server.round, experiment.server.round == experiment.server.rounds
        self.rows: list[Row] = rows_at(folder, number, split) if folder is not None and is_last else []
        self.rows_of_round = number if self.rows else -1
        self.complete = -1

    def __call__(self, server: Server) -> None:
        self.meter.pause(self.experiment.ledger)
        if not self.beside.busy:
            self.conclude()
        losses = self.experiment.delivery.losses_of_round
        if server.round and losses:
            self.write(
                [{"round": server.round, "view": "training", "client": client, "loss": loss} for client, loss in losses.items()]
            )
        every = server.settings.evaluate_every
        if self.selection is not None and is_turn(server.round, server.rounds, every or 1):
            self.write([as_line(server.round, row) for row in self.selection.look()])
        if is_turn(server.round, server.rounds, every):
            self.evaluate()
        if self.folder is not None and self.is_time(server):
            self.save()
        self.complete = server.round
        self.meter.go_on(measure_memory=not self.beside.busy or self.copied_bytes < LEFT_BEHIND)

    def is_time(self, server: Server) -> bool:
        """Whether a checkpoint is due; the state before round 1 is always saved. Seconds are no reason to wait for the one before."""
        every = server.settings.checkpoint_every
        if server.round == 0:
            return True
        if every.endswith("s"):
            return not self.beside.busy and time.monotonic() - self.last_saved >= float(every[:-1])
        return server.round % int(every) == 0

    def evaluate(self) -> list[Row]:
        """Score the present state once, and write it down."""
        number = self.experiment.server.round
        if self.rows_of_round != number:
            self.rows, self.rows_of_round = self.experiment.evaluate(self.split), number
            self.write([as_line(number, row) for row in self.rows])
        return self.rows

    def final_rows(self) -> list[Row]:
        """Score the model the run ends with."""
        if self.selection is None:
            return self.evaluate()
        self.selection.take()
        self.rows = self.experiment.evaluate(self.split)
        selected = {"selected_round": self.selection.round}
        self.write(
            [{**as_line(self.experiment.server.round, row), "view": f"selected_{row.view}", **selected} for row in self.rows]
        )
        return self.rows

    def write(self, lines: list[Mapping[str, Any]]) -> None:
        """Add lines to the metrics."""
        if self.folder is not None:
            self.folder.append(lines)

    def save_if_between_rounds(self) -> None:
        """After a failure: a round that was cut off must be held again from its start, so only a state between rounds is worth saving."""
        self.settle()
        if self.folder is None or self.experiment.server.round != self.complete or self.complete == self.saved:
            return
        try:
            self.save(at_once=True)
        except RunFolderError as error:
            log.warning("%s", error)

    def settle(self) -> None:
        """After a failure: let the checkpoint on its way arrive. That the run failed is worse than that this did too."""
        try:
            self.conclude()
        except RunFolderError as error:
            log.warning("%s", error)

    def conclude(self) -> None:
        """Wait for the checkpoint on its way; if it could not be written, that is raised here."""
        if self.on_its_way is None:
            return
        self.beside.wait()
        former, self.on_its_way = self.on_its_way, None
        try:
            self.beside.finish()
        except BaseException:
            self.experiment.delivery.changed |= former.changed
            raise
        self.arrived(former)

    def arrived(self, checkpoint: OnItsWay) -> None:
        """Note that a checkpoint can be gone back to."""
        self.saved = checkpoint.round
        self.experiment.delivery.hold("checkpoint", checkpoint.held)

    def save(self, at_once: bool = False, finished: bool = False) -> None:
        """Take a checkpoint, to be written while the next round trains, or at once."""
        assert self.folder is not None
        self.conclude()
        delivery = self.experiment.delivery
        snapshot = self.experiment.snapshot()
        snapshot.notes |= {"metrics_size": self.folder.metrics_size(), "finished": finished}
        if finished and delivery.remote:
            snapshot.notes["client_digests"] = delivery.client_digests()
        snapshot.notes["best"] = None if self.selection is None else self.selection.notes()
        draft = self.folder.checkpoints.draft(snapshot, delivery.changed, finished)
        # Where clients keep their state themselves, what is here are marks of it, small and never changed.
        taken = OnItsWay(snapshot.round, delivery.changed, dict(snapshot.clients) if delivery.remote else {})
        if at_once:
            self.folder.checkpoints.put(draft)
            delivery.changed = set()
            self.arrived(taken)
        else:
            draft = draft.apart(state_is_replaced=not any(map(self.experiment.method.fills, OWN_CODE_AT_THE_SERVER)))
            delivery.changed, self.on_its_way = set(), taken
            delivery.hold("on its way", taken.held)
            self.copied_bytes = draft.copied_bytes
            self.beside.start(functools.partial(self.folder.checkpoints.put, draft))
        self.last_saved = time.monotonic()


def is_turn(number: int, rounds: int, every: int) -> bool:
    """Whether a round is scored; the last one always is, unless only the end is (0)."""
    return bool(every and number) and (number % every == 0 or number == rounds)


def as_line(number: int, row: Row) -> dict[str, Any]:
    """A score as a line of metrics."""
    return {"round": number, "view": row.view, "client": row.client, "domain": row.domain, **row.numbers}


def record(
    experiment: Experiment,
    folder: RunFolder | None,
    progress: bool = False,
    resumed: bool = False,
    observers: Sequence[Observer] = (),
    split: str = "test",
    best: Mapping[str, Any] | None = None,
) -> Result:
    """Train and evaluate on a split, with everything written to the folder on the way."""
    if folder is None:
        return trained(experiment, Recorder(experiment, None, split, best), progress, observers)
    with folder.held():
        experiment.delivery.keep_in(folder.path)
        if not resumed:
            folder.create(experiment.settings, facts_of(experiment))
        return trained(experiment, Recorder(experiment, folder, split, best), progress, observers)


def trained(experiment: Experiment, recorder: Recorder, progress: bool, observers: Sequence[Observer]) -> Result:
    """Train to the end, and score the model the run ends with; whatever happens, what was saved is whole."""
    folder = recorder.folder
    try:
        with progress_bar(experiment, progress) as advance:
            experiment.train([recorder, *([advance] if advance is not None else []), *observers])
    except BaseException:
        recorder.save_if_between_rounds()
        experiment.delivery.close()
        raise
    try:
        rows = recorder.final_rows()
        if folder is not None:
            leave_newcomer(experiment, folder.path)
            recorder.save(at_once=True, finished=True)
    except BaseException:
        recorder.settle()
        raise
    finally:
        experiment.delivery.close()
    return Result(experiment, rows, None if folder is None else str(folder.path))


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What ``run.toml`` says beside the settings."""
    return {
        "given_in_python": experiment.given,
        "method": {
            "text": str(experiment.method),
            "all_options": experiment.method.full_text,
            "leaves": experiment.method.facts.leaves,
            "grain": experiment.method.facts.grain,
            "pools_data": experiment.method.population is not None,
        },
        "data": identity_of(experiment.federation),
        "model": {
            "type": type(experiment.bench.model).__name__,
            "parameters": sum(p.numel() for p in experiment.bench.model.parameters()),
            "head": experiment.bench.head or "",
        },
        "outline": outline_of(experiment.federation),
        "plan": experiment.plan_table(),
    }


def resume(
    path: str | Path,
    data: Any = None,
    model: Any = None,
    progress: bool = False,
    notify: Callable[[str], None] = print,
    observers: Sequence[Observer] = (),
    split: str = "test",
    method: Method | None = None,
    delivery: DeliveryFor | None = None,
    load: Sequence[str] | None = None,
    root: str | None = None,
    device: str | None = None,
) -> Result:
    """Go on with a run from its last good checkpoint, to the same end as if it had never stopped.

    Args:
        path: the run folder.
        data: the data, where the run was started from Python with data that have no name.
        model: likewise.
        progress: show a progress bar.
        notify: is told about damaged files.
        observers: called after every round.
        split: what the run is evaluated on: test or validation.
        method: the method, where it is a value of Python that is not registered.
        delivery: how clients are reached, where the settings do not say it all.
        load: the files of methods, where they lie elsewhere than when the run was begun.
        root: the folder of the data set's files, or the folder of images, where it lies elsewhere.
        device: where models are trained, if not as before; another one may round in another way.
    """
    from polyfed.experiment import Experiment
    from polyfed.simulate.chosen import delivery_for

    folder = RunFolder(path)
    settings = on_this_machine(folder.settings_to_go_on(), root, device, load)
    folder.require_objects({"data": data, "method": method, "model": model})
    experiment = Experiment(settings, data, method, model, delivery or delivery_for)
    folder.require_data(identity_of(experiment.federation))
    experiment.delivery.keep_in(folder.path)
    snapshot, complaints = folder.checkpoints.read()
    if not is_finished(snapshot):
        with folder.held():
            snapshot, complaints = folder.checkpoints.read()  # until now another process may have trained it
            if not is_finished(snapshot):
                best = go_back(experiment, folder, snapshot, complaints, notify)
                return record(experiment, folder, progress, resumed=True, observers=observers, split=split, best=best)
    go_back(experiment, folder, snapshot, complaints, notify)
    leave_newcomer(experiment, folder.path, anew=False)
    return Result(experiment, rows_at(folder, experiment.server.round, split), str(path))


def is_finished(snapshot: Snapshot | None) -> bool:
    """Whether a run came to its end; nobody writes to it any more."""
    return snapshot is not None and bool(snapshot.notes["finished"])


def go_back(
    experiment: Experiment, folder: RunFolder, snapshot: Snapshot | None, complaints: Sequence[str], notify: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Put an experiment, and its metrics, in the state of a checkpoint. Returns what it says about the best round so far."""
    for complaint in complaints:
        notify(f"{complaint} The checkpoint before it is used.")
    if snapshot is None and complaints:
        raise RunFolderError(f"{folder.path} has no good checkpoint left; start again with another --out.")
    if snapshot is None or snapshot.round == 0:  # the openings are held again, and what they cost must not count twice
        folder.truncate_metrics(0)
        return None
    experiment.restore(snapshot)
    if not folder.truncate_metrics(snapshot.notes["metrics_size"]):
        notify(f"{folder.metrics_file} is shorter than its checkpoint says: some scores of earlier rounds are lost.")
    best: Mapping[str, Any] | None = snapshot.notes.get("best")
    return best


def rows_at(folder: RunFolder, number: int, split: str = "test") -> list[Row]:
    """The scores of one round, from the metrics."""
    keys = ("round", "view", "client", "domain", "selected_round")
    views = ("seen", "unseen") if split == "test" else (split,)
    lines = [line for line in folder.metrics() if line["round"] == number]
    selected = [{**line, "view": line["view"].removeprefix("selected_")} for line in lines if line["view"].startswith("selected_")]
    found = selected or [line for line in lines if line["view"] in views]
    return [Row(m["view"], m["client"], m["domain"], {k: v for k, v in m.items() if k not in keys}) for m in found]


@contextlib.contextmanager
def progress_bar(experiment: Experiment, show: bool) -> Iterator[Observer | None]:
    """A bar with the time left, on standard error."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(str(experiment.method), total=experiment.settings.rounds, completed=experiment.server.round)
        yield lambda server: bar.update(task, completed=server.round)
