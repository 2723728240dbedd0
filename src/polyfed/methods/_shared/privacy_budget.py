"""A client's budget of differential privacy: the noise that it needs, what was spent, and when the client stops. The accountant is opacus'.

A history is a list of (noise multiplier, sample rate, steps): every step is a Gaussian mechanism on a Poisson sample. It is all an accountant
needs, so it is what clients, servers and checkpoints keep.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.part import Part
from polyfed.core.privacy import ACCOUNTS, Charge
from polyfed.core.seeds import generator
from polyfed.core.server import Server
from polyfed.errors import Declined, MissingExtra, OptionError
from polyfed.extras import Number, Record
from polyfed.methods._shared import require_choice
from polyfed.methods._shared.secure_noise import SecureStream
from polyfed.models.layers.sample_gradients import NEEDS_OPACUS

History: TypeAlias = "list[list[float]]"

SEED, SYSTEM = "seed", "system"
TOLERANCE = 1e-3
"""How far below its budget a planned run may end, as a share of epsilon."""

MIN_NOISE, MAX_NOISE = 0.1, 1e6
MIN_CLIP, MAX_CLIP = 1e-6, 1e6
"""Clips far from the numbers of a model: beyond these, single precision would round away what was clipped, or the noise."""

ACCOUNT_UPLOADS = "its account (epsilon spent, steps, noise and sample rate: a few numbers per round)"
ACCOUNT = Record(
    {
        "epsilon_spent": Number(minimum=0),
        "epsilon": Number(minimum=0),
        "delta": Number(minimum=0, maximum=1),
        "noise_multiplier": Number(minimum=0),
        "sample_rate": Number(minimum=0, maximum=1),
        "steps": Number(minimum=0, whole=True),
    }
)


@dataclass(frozen=True)
class Budget:
    """What may be spent."""

    epsilon: float
    delta: float

    def spent(self, history: Sequence[Sequence[float]]) -> float:
        """Epsilon of what was done so far, at this budget's delta."""
        return epsilon_of(tuple((float(sigma), float(rate), int(steps)) for sigma, rate, steps in history), self.delta)

    def multiplier(self, rate: float, steps: int) -> float:
        """The noise that a plan of steps needs."""
        return noise_for(self.epsilon, self.delta, rate, steps)


def extended(history: Sequence[Sequence[float]], multiplier: float, rate: float, steps: int) -> History:
    found = [list(row) for row in history]
    if found and found[-1][:2] == [multiplier, rate]:
        found[-1][2] += steps
    else:
        found.append([multiplier, rate, steps])
    return found


@functools.lru_cache(maxsize=4096)
def divergences(multiplier: float, rate: float) -> tuple[float, ...]:
    """Rényi divergences of one step at opacus' orders; those of n steps are n times as large."""
    orders, analysis = _opacus()
    found: Sequence[float] = analysis.compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=orders)
    return tuple(float(value) for value in np.atleast_1d(found))


def epsilon_of(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon of a history, as opacus' RDP accountant gives it."""
    if not history:
        return 0.0
    orders, analysis = _opacus()
    total = sum(steps * np.asarray(divergences(multiplier, rate)) for multiplier, rate, steps in history)
    with warnings.catch_warnings():
        # Where the best order is the last one, epsilon is an upper bound that other orders would tighten.
        warnings.simplefilter("ignore", UserWarning)
        epsilon, _ = analysis.get_privacy_spent(orders=orders, rdp=total, delta=delta)
    return float(epsilon)


@functools.lru_cache(maxsize=4096)
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The noise multiplier with which a plan of steps spends a budget to a thousandth, and no more."""

    def excess(logarithm: float) -> float:
        found = epsilon_of(((math.exp(logarithm), rate, steps),), delta)
        return math.log(max(found, 1e-12) / (epsilon * (1 - TOLERANCE / 2)))

    low, high = math.log(MIN_NOISE), 0.0
    while excess(high) > 0:
        low, high = high, high + 1.0
        if high > math.log(MAX_NOISE):
            raise OptionError(
                f"No noise makes {steps} steps at the sample rate {rate:.3g} (epsilon={epsilon:g}, delta={delta:g})-private. "
                "Raise epsilon, or plan fewer rounds."
            )
    if excess(low) <= 0:
        return MIN_NOISE
    multiplier = math.exp(optimize.brentq(excess, low, high, xtol=TOLERANCE / 20))
    while epsilon_of(((multiplier, rate, steps),), delta) > epsilon:
        multiplier *= 1 + TOLERANCE / 10
    return float(multiplier)


def _opacus() -> tuple[list[float], Any]:
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise MissingExtra(NEEDS_OPACUS) from error
    return RDPAccountant.DEFAULT_ALPHAS, rdp


@dataclass(frozen=True)
class Randomness:
    """Where noise and samples come from.

    From the run's seed they are the same in every process and on every machine, and whoever knows the seed can take them off again. The system's
    generator is for real deployments: nobody can repeat what it gave.
    """

    source: str
    seed: int
    names: tuple[str | int, ...]

    @functools.cached_property
    def stream(self) -> torch.Generator:
        return generator(self.seed, *self.names)

    @functools.cached_property
    def secure(self) -> SecureStream:
        return SecureStream()

    def add_noise(self, value: Tensor, spread: float) -> Tensor:
        if self.source == SYSTEM:
            return self.secure.add_noise(value, spread)
        noise = torch.empty(value.shape, dtype=value.dtype).normal_(0.0, spread, generator=self.stream).to(value.device)
        return noise.add_(value)

    def uniform(self, count: int) -> Tensor:
        return (
            self.secure.uniform(count) if self.source == SYSTEM else torch.rand(count, generator=self.stream, dtype=torch.float64)
        )


def clip_problem(clip: object) -> str:
    if isinstance(clip, int | float) and not isinstance(clip, bool) and MIN_CLIP <= clip <= MAX_CLIP:
        return ""
    return f"clip must lie between {MIN_CLIP:g} and {MAX_CLIP:g}, found {clip!r}"


def require_clip(part: str, clip: object) -> None:
    """Refuse a clip that single precision cannot hold to."""
    if problem := clip_problem(clip):
        raise OptionError(f"{part}: {problem}.")


def require_budget(part: str, epsilon: float, delta: float, noise: str, planned_rounds: int) -> None:
    """Refuse options that promise nothing."""
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise OptionError(f"{part}: {name} must be a positive number, found {value!r}.")
    if delta >= 1:
        raise OptionError(
            f"{part}: delta must lie below 1, and well below one over the number of those protected; found {delta!r}."
        )
    require_choice(part, "noise", noise, (SEED, SYSTEM))
    if isinstance(planned_rounds, bool) or not isinstance(planned_rounds, int) or planned_rounds < 0:
        raise OptionError(f"{part}: planned_rounds takes a number of rounds, or 0 for all, found {planned_rounds!r}.")


@dataclass(frozen=True)
class Account(Part):
    """A client's budget and what it has spent. The history is part of what the client keeps, so a resumed run goes on with it.

    ``account_key`` is its place in the client's memory; ``whole``: what is protected is the client, not each of its samples.
    """

    budget: Budget
    rounds: int
    noise: str
    account_key: str
    whole: bool = False
    reads_data = False

    def rate(self, client: Client) -> float:
        """The probability with which a sample is in a batch; a whole client is in every round that it answers."""
        if self.whole:
            return 1.0
        return min(1.0, client.bench.settings.batch_size / len(client.data.train))

    def steps(self, client: Client) -> int:
        """Noisy steps in a round: as many as shuffled batches would give; one where a client's whole update gets noise."""
        settings = client.bench.settings
        if self.whole:
            return 1
        if settings.local_steps is not None:
            return settings.local_steps
        return settings.local_epochs * math.ceil(len(client.data.train) / settings.batch_size)

    def multiplier(self, client: Client) -> float:
        """The noise for the steps that are planned."""
        return self.budget.multiplier(self.rate(client), (self.rounds or client.rounds) * self.steps(client))

    def history(self, client: Client) -> History:
        """What was done before this round."""
        found: History = client.memory.get(self.account_key, [])
        return found

    def after_round(self, client: Client) -> History:
        """What will have been done after it. Where nobody can repeat the noise, every attempt of a round has to be counted."""
        attempts = client.attempt + 1 if self.noise == SYSTEM else 1
        return extended(self.history(client), self.multiplier(client), self.rate(client), attempts * self.steps(client))

    def charge(self, client: Client) -> Charge:
        """What this one training spends, whichever round and attempt the server says it is."""
        return Charge("clients" if self.whole else "samples", self.multiplier(client), self.rate(client), self.steps(client))

    def randomness(self, client: Client, *names: str | int) -> Randomness:
        """Where this client's noise and samples of this round come from."""
        return Randomness(self.noise, client.bench.settings.seed, (self.account_key, client.round, client.id, *names))


@dataclass(frozen=True)
class RequireBudget(Account):
    """Take part only where the round fits into what is left."""

    def __call__(self, client: Client) -> None:
        if self.budget.spent(self.after_round(client)) > self.budget.epsilon * (1 + 1e-9):
            spent = self.budget.spent(self.history(client))
            raise Declined(
                f"Client {client.id} takes no part in round {client.round}: it has spent epsilon = {spent:.4g} of "
                f"{self.budget.epsilon:g}, and this round would take it beyond."
            )
        client.spend(self.charge(client))


@dataclass(frozen=True)
class NoteSpent(Account):
    """Write down what the round has spent, and say so."""

    def __call__(self, client: Client) -> Mapping[str, Any]:
        history = self.after_round(client)
        client.memory[self.account_key] = history
        account = {
            "epsilon_spent": self.budget.spent(history),
            "epsilon": float(self.budget.epsilon),
            "delta": float(self.budget.delta),
            "noise_multiplier": self.multiplier(client),
            "sample_rate": self.rate(client),
            "steps": int(sum(steps for *_, steps in history)),
        }
        return {ACCOUNTS: account}


def note_accounts(server: Server, extras: Mapping[str, Mapping[str, Any]]) -> None:
    before: Mapping[str, Any] = server.persistent(ACCOUNTS, dict)
    # A new value, not a changed one: the loop puts the old one back when the round is repeated.
    server.memory[ACCOUNTS] = {**before, **{client: dict(sent[ACCOUNTS]) for client, sent in extras.items()}}
