"""What a run would cost, measured: the run's own loop for two rounds, on a few batches of every client.

It is measured at two lengths. Processor time is taken to be a straight line over the examples trained or scored on, and the two
lengths give the line; so a method's setup, asks and server steps count, and nothing here knows any method. What a method does only
in later rounds is not seen.
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

from polyfed.backends.workers import worker_count
from polyfed.core.data_types import Examples, Federation
from polyfed.core.method import Method, as_method, load_file
from polyfed.core.rounds import TRAINING, Replies, Request, SendRequest, run_rounds
from polyfed.core.server import Server
from polyfed.core.workbench import give_back
from polyfed.errors import PolyfedError
from polyfed.runs.assemble import build_federation
from polyfed.runs.callbacks.evaluation import is_turn
from polyfed.runs.costs import load_libraries, peak_size, reset_peak
from polyfed.runs.experiment import Experiment, rounds_from_budget, settings_given, threads, without_partition
from polyfed.runs.scores import BEST_VALIDATION
from polyfed.runs.training_settings import with_declared
from polyfed.settings import Settings
from polyfed.studies.compare.compare import ComparisonRun

ROUNDS = 2
SHORT, MIN_LONG, MAX_LONG = 2, 4, 64
"""Batches of every client: in the short measurement, and in the long one at least and at most."""
SHORT_TEST, LONG_TEST = 1, 3
"""Batches of the largest test set; the others are cut by the same share."""
_LEAST_SCORED = 2
"""Statistics cannot be estimated from one example."""
SECONDS = 20.0


@dataclass(frozen=True)
class Line:
    """CPU seconds over an amount of work."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        return self.fixed + self.each * amount

    @classmethod
    def through(cls, short: tuple[float, float], long: tuple[float, float]) -> Line:
        """The line through two measurements (amount, seconds); neither part of it is negative, whatever the noise.

        >>> Line.through((2, 5.0), (4, 6.0)), Line.through((2, 1.0), (4, 4.0)), Line.through((2, 5.0), (4, 4.0))
        (Line(fixed=4.0, each=0.5), Line(fixed=0.0, each=1.0), Line(fixed=4.5, each=0.0))
        """
        (little, sooner), (much, later) = short, long
        each = (later - sooner) / (much - little) if much > little else 0.0
        if each <= 0:
            return cls((sooner + later) / 2, 0.0)
        fixed = sooner - each * little
        return cls(fixed, each) if fixed >= 0 else cls(0.0, later / much)


@dataclass(frozen=True)
class Measurement:
    """What a few batches took: CPU seconds of each part, over how much; bytes of the last round, by client.

    ``asked`` are clients in the last round, ``trained`` the examples that one of them trained on, on average.
    """

    examples: int
    setup: float
    rounds: tuple[float, ...]
    asked: int
    trained: float
    share_scored: float
    scoring: float
    validating: float
    bytes_up: float
    bytes_down: float
    peak: int | None
    phases: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """What one run would cost. Seconds are CPU seconds, on a GPU those of the clock; ``scoring`` is one scoring of all test data, ``validating`` one of all validation data.

    ``later`` are rounds from which on other entries travel, so that the method may work in another way than was measured.
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
        """Of the whole run."""
        return self.once + self.rounds * self.round + self.scorings * self.scoring + self.validations * self.validating

    @property
    def traffic(self) -> float:
        """Bytes of the rounds in both directions, all clients together."""
        return self.rounds * self.clients * (self.bytes_up + self.bytes_down)


class Estimator:
    """Measures how fast one method is on some data, and says what runs on these and similar data would cost.

    Args:
        settings: of the run.
        federation: its data, dealt to clients.
        method: its method, if not the one the settings name.
        model: its model, if not the one the settings name.
        seconds: about how long the long measurement may take.
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
        settled = rounds_from_budget(self.settings, self.population_of(federation))
        load_libraries()
        self.short = self.measure(settled, federation, SHORT, SHORT_TEST)
        batches = int(seconds / max(self.short.rounds[-1], 1e-3))
        self.long = self.measure(settled, federation, min(max(batches, MIN_LONG), MAX_LONG), LONG_TEST)

    def population_of(self, federation: Federation) -> Federation:
        """The data as the method's clients hold them."""
        return federation if self.method.population is None else self.method.population(federation)

    def measure(self, settled: Settings, federation: Federation, batches: int, test_batches: int) -> Measurement:
        """Train two rounds and score once, on a number of batches of every client."""
        settings = shorter(settled, batches)
        largest = max(map(len, _scored_examples(federation)), default=1)
        share = min(1.0, test_batches * settings.test_batch_size / largest)
        gc.collect()  # a hypernetwork of the measurement before would count as memory that is taken
        give_back()
        reset_peak()
        cut = shortened(federation, batches * settings.batch_size, share)
        experiment = Experiment(settings, cut, self.method, self.model)
        self.notices, self.bench = experiment.notices, experiment.bench
        meter = LoopMeter(experiment)
        with threads(settings.threads):
            run_rounds(self.method, experiment.server, experiment.backend, meter.ask, ROUNDS, (meter.mark,))
        asked = meter.asked[ROUNDS]
        taking_part = tuple(client for client in experiment.federation.clients if client.id in asked)
        return Measurement(
            examples=_examples_in(experiment.federation),
            setup=meter.seconds[0],
            rounds=tuple(meter.seconds[1:]),
            asked=len(asked),
            trained=_trained_by_a_client(settings, dataclasses.replace(cut, clients=taking_part)),
            share_scored=share,
            scoring=meter.scoring("test"),
            validating=meter.scoring("validation") if settings.selection == BEST_VALIDATION else 0.0,
            bytes_up=meter.travelled("up") / len(asked),
            bytes_down=meter.travelled("down") / len(asked),
            peak=peak_size(),
            phases=tuple(experiment.bench.plan.phases),
        )

    def estimate(self, federation: Federation) -> Estimate:
        federation = self.population_of(federation)
        settings = rounds_from_budget(self.settings, federation)
        every, validated = settings.evaluate_every, settings.needs_validation
        clients = settings.sampled(len(federation.clients))
        short, long = self.short, self.long
        setup = Line.through((short.examples, short.setup), (long.examples, long.setup))
        training = Line.through((short.trained, short.rounds[-1] / short.asked), (long.trained, long.rounds[-1] / long.asked))
        scoring = Line.through((short.share_scored, short.scoring), (long.share_scored, long.scoring))
        validating = Line.through((short.share_scored, short.validating), (long.share_scored, long.validating))
        return Estimate(
            method=str(self.method),
            rounds=settings.rounds,
            # Where steps are compiled, that happens in the first round.
            once=setup.at(_examples_in(federation)) + max(0.0, short.rounds[0] - short.rounds[-1]),
            round=clients * training.at(_trained_by_a_client(settings, federation)),
            scorings=validated + max(1 - validated, turns(settings.rounds, 0 if validated else every, settings.scored_at_end)),
            scoring=scoring.at(1),
            validations=turns(settings.rounds, every or 1) if validated else 0,
            validating=validating.at(1),
            bytes_up=long.bytes_up,
            bytes_down=long.bytes_down,
            clients=clients,
            workers=1 if settings.workers == "1" else worker_count(self.bench, len(federation.clients), settings.workers),
            peak=long.peak,
            later=tuple(start + 1 for start in long.phases if ROUNDS <= start < settings.rounds),
        )


def turns(rounds: int, every: int, at_end: int = 0) -> int:
    return sum(is_turn(number, rounds, every, at_end) for number in range(1, rounds + 1))


def _examples_in(federation: Federation) -> int:
    return sum(len(client.train) for client in federation.clients)


def _trained_by_a_client(settings: Settings, federation: Federation) -> float:
    if settings.local_steps is not None:
        return settings.local_steps * settings.batch_size
    return settings.local_epochs * _examples_in(federation) / len(federation.clients)


def shorter(settings: Settings, batches: int) -> Settings:
    """The settings of a measurement: few steps, in this process, where processor time can be seen."""
    return dataclasses.replace(
        without_partition(settings),
        rounds=max(settings.rounds, ROUNDS),
        local_steps=None if settings.local_steps is None else min(settings.local_steps, batches),
        workers="1",
        backend="process" if settings.backend == "flower" else settings.backend,
    )


class LoopMeter:
    """Notes seconds and bytes at the marks of the loop, and which clients were asked in each round."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.forward: SendRequest = experiment.send_request
        self.asked: dict[int, set[str]] = {}
        self.seconds: list[float] = []
        self.bytes: list[dict[str, int]] = []
        # A processor waits for a GPU, so that its own time says nothing there; rounds and scores end with values on the CPU.
        self.clock = time.process_time if experiment.bench.device.type == "cpu" else time.perf_counter
        self.last = self.clock()

    def ask(self, request: Request) -> Replies:
        if request.purpose == TRAINING:
            self.asked.setdefault(request.round, set()).update(request.payloads)
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

    def travelled(self, way: str) -> int:
        return self.bytes[-1][way] - self.bytes[-2][way]


def _scored_examples(federation: Federation) -> list[Examples]:
    tests = [examples for parts in federation.tests().values() for examples in parts]
    return [*tests, *federation.unseen.values(), *(c.validation for c in federation.clients if c.validation is not None)]


def shortened(federation: Federation, most: int, share: float) -> Federation:
    """The federation with at most ``most`` training examples a client, and a share of what is scored; what clients share, they still share."""
    done: dict[int, Examples] = {}

    def part(examples: Examples) -> Examples:
        if id(examples) not in done:
            done[id(examples)] = spread(examples, max(_LEAST_SCORED, math.ceil(share * len(examples))))
        return done[id(examples)]

    clients = tuple(
        dataclasses.replace(
            client,
            train=spread(client.train, most),
            tests={domain: part(examples) for domain, examples in client.tests.items()},
            validation=None if client.validation is None else part(client.validation),
        )
        for client in federation.clients
    )
    return dataclasses.replace(federation, clients=clients, unseen={d: part(e) for d, e in federation.unseen.items()})


def spread(examples: Examples, count: int) -> Examples:
    """A number of examples, evenly spread, so that sorted ones keep their classes."""
    if count >= len(examples):
        return examples
    return examples.subset(torch.arange(count) * len(examples) // count)


@dataclass
class MethodEstimate:
    """What the runs of one method would cost, an estimate each.

    Attributes:
        method: the method's text.
        runs: an estimate for each run.
        problem: why it cannot be run, if it cannot.
        notices: what a user should know before running it.
    """

    method: str
    runs: list[Estimate] = field(default_factory=list)
    problem: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def cpu_seconds(self) -> float:
        return sum(run.cpu_seconds for run in self.runs)


def estimate_run(data: Any, method: str | Method | None, model: Any, seconds: float = SECONDS, **settings: Any) -> Estimate:
    """What ``polyfed.estimate`` does."""
    given = settings_given(data, model, settings)
    federation = build_federation(data, given)
    return Estimator(given, federation, method, model, seconds).estimate(federation)


def estimate_runs(runs: Sequence[ComparisonRun], data: Any, notify: Callable[[str], None]) -> list[MethodEstimate]:
    """What the runs of each method would cost; each method is measured once.

    One method of several that cannot be built has a problem instead; where there is only one, its error is raised.

    Args:
        runs: of a comparison, or a single one.
        data: their data.
        notify: Called with what is measured next.
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
