"""What Optuna proposes for one method, one trial after the other, kept in a file that a search goes on from.

The sampler is seeded by the number of the trial, and what it learns from is in the file, so a search that was stopped proposes what it
would have proposed. Which trials are behind is worked out again from the file too: no decision is lost between two writes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from polyfed.core.seeds import chooser, derive
from polyfed.errors import RunFolderError, SettingError, nearest
from polyfed.studies.sweep.space import Axis, Values, grid, rounded_rate, too_few

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = "optuna.log"
SAMPLERS = ("tpe", "random")
FIRST_AT_RANDOM = 5
"""Trials before TPE has enough to learn from."""
FACTOR = 3
"""Of so many trials at a rung of successive halving, one goes on; so much longer is the next rung."""
REPEATS_IN_A_ROW = 200
SEED_BITS = 32

# Studies and trials are reported by polyfed itself.
optuna.logging.set_verbosity(optuna.logging.WARNING)


def check_sampler(name: str) -> None:
    """Refuse a sampler that there is not."""
    if name not in SAMPLERS:
        raise SettingError(f"sampler cannot be {name!r}. {nearest(name, SAMPLERS)}")


def open_store(folder: Path) -> JournalStorage:
    """The file of a search, with a last line that a kill cut off taken away."""
    path = folder / FILE
    lock = KernelLock(folder / f"{FILE}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.held():
            mend(path)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=None if fcntl is None else lock))
    except OSError as error:
        raise RunFolderError(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    except (ValueError, KeyError) as error:
        raise RunFolderError(f"{path} cannot be read as a search of Optuna ({error}). Choose another --out.") from error


def mend(path: Path) -> None:
    """Cut off what follows the last line that was written whole."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n") and content:
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class NoCombinationLeft(SettingError):
    """Everything that can be tried was tried."""


class KernelLock(JournalFileOpenLock):
    """A lock that the kernel lets go of when its holder is killed; Optuna's own locks stay behind for half a minute."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        self.file: IO[str] | None = None

    def acquire(self) -> bool:
        self.file = self.path.open("w")
        if fcntl is not None:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it inside the block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


class Proposals:
    """The trials of one method, in order: the start (a grid), then what the sampler proposes. No two are equal."""

    def __init__(
        self,
        folder: Path,
        store: JournalStorage,
        text: str,
        axes: Sequence[Axis],
        start: Sequence[Values],
        sampler: str,
        seed: int,
        about: Any,
    ) -> None:
        """Find the study of a method, or begin it.

        Args:
            folder: of the search.
            store: the file in it.
            text: the method.
            axes: what is searched for it.
            start: values to try first.
            sampler: one of ``SAMPLERS``.
            seed: of the search.
            about: what else sets this search apart from others in the same file, as JSON.
        """
        self.text, self.axes, self.start, self.sampler, self.seed = text, list(axes), list(start), sampler, seed
        self.space = {axis.name: distribution(axis) for axis in axes}
        described = [text, [[axis.name, [repr(value) for value in axis.values]] for axis in axes], sampler, seed, about]
        name = f"{text} {hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:10]}"
        self.store = store
        self.lock = KernelLock(folder / f"{FILE}.trials")
        self.study = optuna.create_study(storage=store, study_name=name, direction="maximize", load_if_exists=True)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials so far."""
        return self.study.get_trials(deepcopy=False)

    def values(self, number: int) -> Values:
        """What the trial of this number tries: as the file says, or as is proposed now."""
        with self.lock.held():
            found = self.trials
            if number < len(found):
                return self.read(found[number])
            values = self.start[number] if number < len(self.start) else self.proposed(found)
            # In one piece: a trial is in the file with all its values, or not at all.
            self.study.add_trial(create_trial(state=TrialState.RUNNING, params=self.written(values), distributions=self.space))
            return values

    def proposed(self, before: Sequence[FrozenTrial]) -> Values:
        """What the sampler says after these trials; something else at random where that was tried already."""
        tried = [self.read(trial) for trial in before]
        study = optuna.create_study(direction="maximize", sampler=self.seeded(len(before)))
        study.add_trials(before)
        for attempt in range(REPEATS_IN_A_ROW):
            trial = study.ask(self.space)
            values = self.read(trial)
            if values not in tried:
                return values
            study.tell(trial, state=TrialState.FAIL)
            study.sampler = RandomSampler(seed=derive(self.seed, "sweep", len(before), attempt) % 2**SEED_BITS)
        left = [values for values in grid(self.axes) if values not in tried]
        if not left:
            raise NoCombinationLeft(str(too_few(self.text, len(tried), len(tried) + 1, "Give --lr values that lie farther apart")))
        return chooser(self.seed, "sweep", len(before)).choice(left)

    def seeded(self, number: int) -> BaseSampler:
        """The sampler of a trial, seeded by its number; the same for every method."""
        own = derive(self.seed, "sweep", number) % 2**SEED_BITS
        return RandomSampler(seed=own) if self.sampler == "random" else TPESampler(seed=own, n_startup_trials=FIRST_AT_RANDOM)

    def written(self, values: Values) -> dict[str, Any]:
        """Values as Optuna keeps them."""
        return {axis.name: values[axis.name] if axis.is_range else repr(values[axis.name]) for axis in self.axes}

    def read(self, trial: Any) -> Values:
        """The values of a trial."""
        found: dict[str, Any] = {}
        for axis in self.axes:
            written = trial.params[axis.name]
            known = {repr(value): value for value in axis.values}
            found[axis.name] = rounded_rate(axis, written) if axis.is_range else known[written]
        return found

    def tell(self, number: int, value: float | None, stopped: bool = False) -> None:
        """What became of a trial: its value, or that it failed; a trial that was stopped has the value of its last rung."""
        state = TrialState.PRUNED if stopped else TrialState.FAIL if value is None else TrialState.COMPLETE
        with self.lock.held():
            if not self.trials[number].state.is_finished():
                self.study.tell(number, value if state is TrialState.COMPLETE else None, state=state)

    def report(self, number: int, rung: int, value: float) -> None:
        """What validation says of a trial at a rung of successive halving."""
        with self.lock.held():
            trial = self.trials[number]
            if step_of(rung) not in trial.intermediate_values and not trial.state.is_finished():
                study = self.store.get_study_id_from_name(self.study.study_name)
                own = self.store.get_trial_id_from_study_id_trial_number(study, number)
                self.store.set_trial_intermediate_value(own, step_of(rung), value)

    def is_behind(self, number: int, rung: int) -> bool:
        """Whether a trial is to be stopped at a rung: Optuna's pruner on the values of this trial and of those before it."""
        before = optuna.create_study(
            direction="maximize",
            pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR),
            sampler=RandomSampler(seed=0),
        )
        behind = False
        for place, trial in enumerate(self.trials[: number + 1]):
            again = before.ask()
            for step, value in sorted(trial.intermediate_values.items()):
                if place < number or step <= step_of(rung):
                    again.report(value, step)
                    behind = again.should_prune()
            before.tell(again, state=TrialState.PRUNED if behind else TrialState.FAIL)
        return behind


def step_of(rung: int) -> int:
    """A rung as a step of Optuna's pruner."""
    return int(FACTOR**rung)


def rungs(rounds: int) -> list[int]:
    """Rounds after which trials are compared: a ninth and a third of all, where that is a round at all.

    >>> rungs(20), rungs(3), rungs(1)
    ([3, 7], [1], [])
    """
    found = [math.ceil(rounds / FACTOR**power) for power in (2, 1)]
    return [number for number in dict.fromkeys(found) if number < rounds]


def distribution(axis: Axis) -> BaseDistribution:
    """The values of an axis as Optuna has them: a range of learning rates, or choices."""
    if axis.is_range:
        return FloatDistribution(min(axis.values), max(axis.values), log=True)
    return CategoricalDistribution(list(dict.fromkeys(repr(value) for value in axis.values)))
