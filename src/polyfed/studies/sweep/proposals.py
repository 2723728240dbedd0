"""Values that Optuna proposes for one method, one trial after the other.

The sampler is seeded by the trial's number and learns from the results of the trials before it. Both are the same when a search is
resumed, since finished trials are read back from their run folders. So the study lives in memory only.
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
_FIRST_AT_RANDOM = 5
"""Trials before TPE has enough to learn from."""
_FACTOR = 3
"""Of so many trials at a rung of successive halving, one continues; so much longer is the next rung."""
_REPEATS_IN_A_ROW = 200
_SEED_BITS = 32

# Studies and trials are reported by polyfed itself.
optuna.logging.set_verbosity(optuna.logging.WARNING)


class NoCombinationLeft(SettingError):
    """Everything that can be tried was tried."""


class Proposals:
    """The trials of one method, in order: the start (a grid), then what the sampler proposes. No two are equal."""

    def __init__(self, text: str, axes: Sequence[Axis], start: Sequence[Values], sampler: str, seed: int) -> None:
        """Begin a study.

        Args:
            text: the method.
            axes: what is searched for it.
            start: values to try first.
            sampler: one of ``SAMPLERS``.
            seed: of the search; the proposals are the same for every method.
        """
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
        # TPE learns from the values that are trained: rounded, or given.
        self._study.enqueue_trial(
            {axis.name: values[axis.name] if axis.is_range else repr(values[axis.name]) for axis in self._axes}
        )
        return values, self._study.ask(self._space)

    def _propose(self, number: int) -> Values:
        """Return what the sampler proposes; something else at random if that was tried already."""
        own = derive(self._seed, "sweep", number) % 2**_SEED_BITS
        self._study.sampler = (
            RandomSampler(seed=own) if self._sampler == "random" else TPESampler(seed=own, n_startup_trials=_FIRST_AT_RANDOM)
        )
        for attempt in range(_REPEATS_IN_A_ROW):
            trial = self._study.ask(self._space)
            self._study.tell(trial, state=TrialState.FAIL)  # samplers ignore it
            values = {axis.name: _read(axis, trial.params[axis.name]) for axis in self._axes}
            if values not in self._tried:
                return values
            self._study.sampler = RandomSampler(seed=derive(self._seed, "sweep", number, attempt) % 2**_SEED_BITS)
        left = [values for values in grid(self._axes) if values not in self._tried]
        if not left:
            raise NoCombinationLeft(str(too_few(self._text, number, number + 1, "Give --lr values that lie farther apart")))
        return chooser(self._seed, "sweep", number).choice(left)

    def tell(self, trial: optuna.Trial, value: float | None, stopped: bool = False) -> None:
        """Record a trial's value, or that it failed; a trial that was stopped has the value of its last rung."""
        state = TrialState.PRUNED if stopped else TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(trial, value if state is TrialState.COMPLETE else None, state=state)


def is_behind(trial: optuna.Trial, rung: int, value: float) -> bool:
    """Report a trial's value at a rung of successive halving; return True if it is behind the trials before it."""
    trial.report(value, _FACTOR**rung)
    return trial.should_prune()


def rungs(rounds: int) -> list[int]:
    """Rounds after which trials are compared: a ninth and a third of all, where that is a round at all.

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
    """Return the value that Optuna's parameter stands for."""
    if isinstance(written, float):
        return rounded_rate(axis, written)
    return {repr(value): value for value in axis.values}[written]
