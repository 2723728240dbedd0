"""Estimate the cost of a run from two rounds on a few batches of every client.

The run is measured with two amounts of data, and the CPU time is extrapolated linearly. This includes the setup, the requests and the
server steps of any method, but not what a method only does in later rounds.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.backends.pace import SECONDS_REPAID, needs_this_process
from polyfed.backends.process_memory import peak_size, reset_peak
from polyfed.backends.workers import worker_count
from polyfed.core.data_types import Examples, Federation
from polyfed.core.method import Method, as_method, load_file
from polyfed.core.rounds import TRAINING, Replies, Request, SendRequest, run_rounds
from polyfed.core.server import Server
from polyfed.core.workbench import give_back
from polyfed.errors import PolyfedError
from polyfed.runs.assemble import build_federation
from polyfed.runs.callbacks.evaluation import is_turn
from polyfed.runs.costs import load_libraries
from polyfed.runs.experiment import Experiment, rounds_from_budget, settings_given, threads, without_partition
from polyfed.runs.scores import BEST_VALIDATION
from polyfed.runs.training_settings import with_declared
from polyfed.settings import AUTO, Settings
from polyfed.studies.compare.compare import ComparisonRun

ROUNDS = 2
SHORT, MIN_LONG, MAX_LONG = 2, 4, 64
"""Batches per client in the short measurement, and the limits for the long one."""
SHORT_TEST, LONG_TEST = 1, 3
"""Batches of the largest test set; the others are reduced by the same factor."""
_MIN_SCORED = 2
"""Statistics cannot be estimated from a single example."""
SECONDS = 20.0


@dataclass(frozen=True)
class Line:
    """CPU seconds as a linear function of the amount of work."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        return self.fixed + self.each * amount

    @classmethod
    def through(cls, short: tuple[float, float], long: tuple[float, float]) -> Line:
        """Return the line through two measurements (amount, seconds), with both coefficients at least 0 despite noise.

        >>> Line.through((2, 5.0), (4, 6.0)), Line.through((2, 1.0), (4, 4.0)), Line.through((2, 5.0), (4, 4.0))
        (Line(fixed=4.0, each=0.5), Line(fixed=0.0, each=1.0), Line(fixed=4.5, each=0.0))
        """
        (small, short_time), (large, long_time) = short, long
        each = (long_time - short_time) / (large - small) if large > small else 0.0
        if each <= 0:
            return cls((short_time + long_time) / 2, 0.0)
        fixed = short_time - each * small
        return cls(fixed, each) if fixed >= 0 else cls(0.0, long_time / large)


@dataclass(frozen=True)
class Measurement:
    """Measured points (amount, CPU seconds), seconds per round, and bytes per client in the last round.

    The amounts are the training examples for ``setup``, the training examples per client for ``training``, and the fraction of the
    scored examples for ``scoring`` and ``validating``.
    """

    setup: tuple[float, float]
    training: tuple[float, float]
    scoring: tuple[float, float]
    validating: tuple[float, float]
    rounds: tuple[float, ...]
    bytes_up: float
    bytes_down: float
    peak: int | None
    phases: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of one run. Seconds are CPU seconds, or wall-clock seconds on a GPU.

    ``scoring`` and ``validating`` are the seconds to score all test or validation data once. ``later`` lists rounds in which the set of
    exchanged entries changes, so the method may then behave differently from what was measured.
    """

    method: str
    rounds: int
    once: float
    round: float
    scorings: int
    scoring: float
    validations: int
    validating: float
    bytes_up: float
    bytes_down: float
    clients: int
    workers: int
    peak: int | None
    later: tuple[int, ...]

    @property
    def cpu_seconds(self) -> float:
        return self.once + self.rounds * self.round + self.scorings * self.scoring + self.validations * self.validating

    @property
    def traffic(self) -> float:
        """Bytes of all rounds in both directions, for all clients."""
        return self.rounds * self.clients * (self.bytes_up + self.bytes_down)


class Estimator:
    """Cost estimates for runs of one method, from measurements on the same or similar data.

    The default method and model are those in the settings. ``seconds`` is the approximate duration of the long measurement.
    """

    def __init__(
        self,
        settings: Settings,
        federation: Federation,
        method: str | Method | None = None,
        model: Any = None,
        seconds: float = SECONDS,
    ) -> None:
        for file in settings.load:
            load_file(file, settings.trust)
        self.method = as_method(settings.method if method is None else method)
        self.settings, self.model = with_declared(settings, federation, model)[0], model
        with_rounds = rounds_from_budget(self.settings, self.population_of(federation))
        load_libraries()
        self.short = self.measure(with_rounds, federation, SHORT, SHORT_TEST)
        batches = int(seconds / max(self.short.rounds[-1], 1e-3))
        self.long = self.measure(with_rounds, federation, min(max(batches, MIN_LONG), MAX_LONG), LONG_TEST)

    def population_of(self, federation: Federation) -> Federation:
        """Return the federation with the clients that the method trains."""
        return federation if self.method.population is None else self.method.population(federation)

    def measure(self, settings: Settings, federation: Federation, batches: int, test_batches: int) -> Measurement:
        """Train two rounds on this number of batches per client, and score once."""
        settings = shorter(settings, batches)
        tests = [examples for parts in federation.tests().values() for examples in parts]
        validations = [client.validation for client in federation.clients if client.validation is not None]
        largest = max(map(len, [*tests, *federation.unseen.values(), *validations]), default=1)
        fraction = min(1.0, test_batches * settings.test_batch_size / largest)
        gc.collect()  # memory of the previous measurement, such as a hypernetwork, must not count
        give_back()
        reset_peak()
        cut = shortened(federation, batches * settings.batch_size, fraction)
        experiment = Experiment(settings, cut, self.method, self.model)
        self.notices, self.bench = experiment.notices, experiment.bench
        meter = LoopMeter(experiment)
        with threads(settings.threads):
            run_rounds(self.method, experiment.server, experiment.backend, meter.send_request, ROUNDS, (meter.mark,))
        requested = meter.requested[ROUNDS]
        participants = tuple(client for client in experiment.federation.clients if client.id in requested)
        trained = _trained_per_client(settings, dataclasses.replace(cut, clients=participants))
        return Measurement(
            setup=(_examples_in(experiment.federation), meter.seconds[0]),
            training=(trained, meter.seconds[-1] / len(requested)),
            scoring=(fraction, meter.scoring("test")),
            validating=(fraction, meter.scoring("validation") if settings.selection == BEST_VALIDATION else 0.0),
            rounds=tuple(meter.seconds[1:]),
            bytes_up=meter.traffic("up") / len(requested),
            bytes_down=meter.traffic("down") / len(requested),
            peak=peak_size(),
            phases=tuple(experiment.bench.plan.phases),
        )

    def estimate(self, federation: Federation) -> Estimate:
        federation = self.population_of(federation)
        settings = rounds_from_budget(self.settings, federation)
        every, validated = settings.evaluate_every, settings.needs_validation
        clients = settings.sampled(len(federation.clients))
        short, long = self.short, self.long
        training = Line.through(short.training, long.training)
        estimate = Estimate(
            method=str(self.method),
            rounds=settings.rounds,
            # The first round includes the compilation of steps, if any.
            once=Line.through(short.setup, long.setup).at(_examples_in(federation)) + max(0.0, short.rounds[0] - short.rounds[-1]),
            round=clients * training.at(_trained_per_client(settings, federation)),
            scorings=validated + max(1 - validated, turns(settings.rounds, 0 if validated else every, settings.scored_at_end)),
            scoring=Line.through(short.scoring, long.scoring).at(1),
            validations=turns(settings.rounds, every or 1) if validated else 0,
            validating=Line.through(short.validating, long.validating).at(1),
            bytes_up=long.bytes_up,
            bytes_down=long.bytes_down,
            clients=clients,
            workers=worker_count(self.bench, len(federation.clients), settings.workers),
            peak=long.peak,
            later=tuple(start + 1 for start in long.phases if ROUNDS <= start < settings.rounds),
        )
        if settings.workers == AUTO and (
            estimate.cpu_seconds < SECONDS_REPAID or needs_this_process(self.bench, federation.clients)
        ):
            return dataclasses.replace(estimate, workers=1)
        return estimate


def turns(rounds: int, every: int, at_end: int = 0) -> int:
    return sum(is_turn(number, rounds, every, at_end) for number in range(1, rounds + 1))


def _examples_in(federation: Federation) -> int:
    return sum(len(client.train) for client in federation.clients)


def _trained_per_client(settings: Settings, federation: Federation) -> float:
    if settings.local_steps is not None:
        return settings.local_steps * settings.batch_size
    return settings.local_epochs * _examples_in(federation) / len(federation.clients)


def shorter(settings: Settings, batches: int) -> Settings:
    """Return the settings of a measurement: few steps, in this process so that the CPU time includes them."""
    return dataclasses.replace(
        without_partition(settings),
        rounds=max(settings.rounds, ROUNDS),
        local_steps=None if settings.local_steps is None else min(settings.local_steps, batches),
        workers="1",
        backend="process" if settings.backend == "flower" else settings.backend,
    )


class LoopMeter:
    """Seconds and bytes per round, and the clients that received requests."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.forward: SendRequest = experiment.send_request
        self.requested: dict[int, set[str]] = {}
        self.seconds: list[float] = []
        self.bytes: list[dict[str, int]] = []
        # CPU time is not informative while the CPU waits for a GPU; rounds and scores end with values on the CPU.
        self.clock = time.process_time if experiment.bench.device.type == "cpu" else time.perf_counter
        self.last = self.clock()

    def send_request(self, request: Request) -> Replies:
        if request.purpose == TRAINING:
            self.requested.setdefault(request.round, set()).update(request.payloads)
        return self.forward(request)

    def mark(self, server: Server) -> None:
        now = self.clock()
        self.seconds.append(now - self.last)
        self.bytes.append({way: self.experiment.costs.total(way) for way in ("up", "down")})
        self.last = now

    def scoring(self, split: str) -> float:
        start = self.clock()
        self.experiment.evaluate(split)
        return self.clock() - start

    def traffic(self, way: str) -> int:
        return self.bytes[-1][way] - self.bytes[-2][way]


def shortened(federation: Federation, max_training: int, fraction: float) -> Federation:
    """Limit the training examples per client, and keep a fraction of the scored ones; test sets shared by clients stay shared."""
    reduced: dict[int, Examples] = {}

    def part(examples: Examples) -> Examples:
        if id(examples) not in reduced:
            reduced[id(examples)] = spread(examples, max(_MIN_SCORED, math.ceil(fraction * len(examples))))
        return reduced[id(examples)]

    clients = tuple(
        dataclasses.replace(
            client,
            train=spread(client.train, max_training),
            tests={domain: part(examples) for domain, examples in client.tests.items()},
            validation=None if client.validation is None else part(client.validation),
        )
        for client in federation.clients
    )
    return dataclasses.replace(federation, clients=clients, unseen={d: part(e) for d, e in federation.unseen.items()})


def spread(examples: Examples, count: int) -> Examples:
    """Return evenly spaced examples, so that sorted ones keep all classes."""
    if count >= len(examples):
        return examples
    return examples.subset(torch.arange(count) * len(examples) // count)


@dataclass
class MethodEstimate:
    """The estimated costs of one method's runs, or the reason why it cannot run."""

    method: str
    runs: list[Estimate] = field(default_factory=list)
    problem: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def cpu_seconds(self) -> float:
        return sum(run.cpu_seconds for run in self.runs)


def estimate_run(data: Any, method: str | Method | None, model: Any, seconds: float = SECONDS, **settings: Any) -> Estimate:
    """Implement ``polyfed.estimate``."""
    given = settings_given(data, model, settings)
    federation = build_federation(data, given)
    return Estimator(given, federation, method, model, seconds).estimate(federation)


def estimate_runs(runs: Sequence[ComparisonRun], data: Any, notify: Callable[[str], None]) -> list[MethodEstimate]:
    """Estimate all runs, measuring each method once.

    Raises:
        PolyfedError: If the only method cannot be built. With several methods, the error goes to ``problem``.
    """
    by_method: dict[str, list[ComparisonRun]] = {}
    federations: dict[str | None, Federation] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
        if run.left_out not in federations:
            federations[run.left_out] = build_federation(data, run.settings)
    found = []
    for number, (method, its_runs) in enumerate(by_method.items(), 1):
        notify(f"Measuring {method} ({number} of {len(by_method)})")
        found.append(MethodEstimate(method))
        try:
            estimator = Estimator(its_runs[0].settings, federations[its_runs[0].left_out], its_runs[0].value)
            found[-1].runs = [estimator.estimate(federations[run.left_out]) for run in its_runs]
            found[-1].notices = estimator.notices
        except PolyfedError as error:
            if len(by_method) == 1:
                raise
            found[-1].problem = str(error)
    return found
