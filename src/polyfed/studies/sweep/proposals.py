"""Propose values for one method with Optuna, trial by trial.

The sampler depends on the trial number and the results of earlier trials. A resumed search reads these results from the run folders, so it
proposes the same values, and the study is only kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from polyfed.core.seeds import chooser, derive
from polyfed.errors import SettingError
from polyfed.studies.sweep.space import Axis, Values, grid, rounded_rate, too_few

SAMPLERS = ("tpe", "random")
_RANDOM_TRIALS = 5
"""Random trials before TPE starts."""
_FACTOR = 3
"""Reduction factor of successive halving: one trial in three continues, and the next rung is three times as long."""
_MAX_REPEATS = 200
_SEED_BITS = 32

# polyfed reports studies and trials itself.
optuna.logging.set_verbosity(optuna.logging.WARNING)


class NoCombinationLeft(SettingError):
    """All combinations have been tried."""


class Proposals:
    """The distinct trials of one method: first the given values (a grid), then those from the sampler."""

    def __init__(self, text: str, axes: Sequence[Axis], start: Sequence[Values], sampler: str, seed: int) -> None:
        """Start a study. ``start`` holds the values to try first; the same seed gives every method the same proposals."""
        self._text, self._axes, self._start, self._sampler, self._seed = text, list(axes), list(start), sampler, seed
        self._space = {axis.name: _distribution(axis) for axis in axes}
        self._tried: list[Values] = []
        pruner = SuccessiveHalvingPruner(min_resource=1, reduction_factor=_FACTOR)
        self._study = optuna.create_study(direction="maximize", pruner=pruner)

    def ask(self) -> tuple[Values, optuna.Trial]:
        """Return the values of the next trial, and the trial to report to."""
        number = len(self._tried)
        values = self._start[number] if number < len(self._start) else self._propose(number)
        self._tried.append(values)
        # TPE must learn from the values that are trained, after rounding.
        self._study.enqueue_trial(
            {axis.name: values[axis.name] if axis.is_range else repr(values[axis.name]) for axis in self._axes}
        )
        return values, self._study.ask(self._space)

    def _propose(self, number: int) -> Values:
        """Return the sampler's values, or random ones if those have been tried."""
        own = derive(self._seed, "sweep", number) % 2**_SEED_BITS
        self._study.sampler = (
            RandomSampler(seed=own) if self._sampler == "random" else TPESampler(seed=own, n_startup_trials=_RANDOM_TRIALS)
        )
        for attempt in range(_MAX_REPEATS):
            trial = self._study.ask(self._space)
            self._study.tell(trial, state=TrialState.FAIL)  # samplers ignore it
            values = {axis.name: _read(axis, trial.params[axis.name]) for axis in self._axes}
            if values not in self._tried:
                return values
            self._study.sampler = RandomSampler(seed=derive(self._seed, "sweep", number, attempt) % 2**_SEED_BITS)
        left = [values for values in grid(self._axes) if values not in self._tried]
        if not left:
            raise NoCombinationLeft(str(too_few(self._text, number, number + 1, "Widen the --lr range")))
        return chooser(self._seed, "sweep", number).choice(left)

    def tell(self, trial: optuna.Trial, value: float | None, stopped: bool = False) -> None:
        """Record the value or failure of a trial. A stopped trial keeps the value of its last rung."""
        state = TrialState.PRUNED if stopped else TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(trial, value if state is TrialState.COMPLETE else None, state=state)


def is_behind(trial: optuna.Trial, rung: int, value: float) -> bool:
    """Report a trial's value at a rung of successive halving, and return True if the trial should stop."""
    trial.report(value, _FACTOR**rung)
    return trial.should_prune()


def rungs(rounds: int) -> list[int]:
    """Return the rounds after which trials are compared: a ninth and a third of all rounds, if distinct.

    >>> rungs(20), rungs(3), rungs(1)
    ([3, 7], [1], [])
    """
    found = [math.ceil(rounds / _FACTOR**power) for power in (2, 1)]
    return [number for number in dict.fromkeys(found) if number < rounds]


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.is_range:
        return FloatDistribution(min(axis.values), max(axis.values), log=True)
    return CategoricalDistribution(list(dict.fromkeys(repr(value) for value in axis.values)))


def _read(axis: Axis, written: float | str) -> object:
    """Convert an Optuna parameter back to a value."""
    if isinstance(written, float):
        return rounded_rate(axis, written)
    return {repr(value): value for value in axis.values}[written]
