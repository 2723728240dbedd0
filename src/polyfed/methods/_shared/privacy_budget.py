"""A client's privacy budget: the required noise, the epsilon spent, and when the client stops. The accountant is from opacus.

A history is a list of (noise multiplier, sample rate, steps): every step is a Gaussian mechanism on a Poisson sample. An accountant
needs nothing else, so clients, servers and checkpoints store it.
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
"""Largest unspent fraction of epsilon after a planned run."""

MIN_NOISE, MAX_NOISE = 0.1, 1e6
MIN_CLIP, MAX_CLIP = 1e-6, 1e6
"""Limits of the clip: beyond them, single precision would round away the clipped values or the noise."""

ACCOUNT_UPLOADS = "its privacy ledger (epsilon spent, steps, noise and sample rate: a few numbers per round)"
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
    epsilon: float
    delta: float

    def spent(self, history: Sequence[Sequence[float]]) -> float:
        return epsilon_of(tuple((float(sigma), float(rate), int(steps)) for sigma, rate, steps in history), self.delta)

    def multiplier(self, rate: float, steps: int) -> float:
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
    """Return the Rényi divergences of one step at the orders of opacus; n steps multiply them by n."""
    orders, analysis = _opacus()
    found: Sequence[float] = analysis.compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=orders)
    return tuple(float(value) for value in np.atleast_1d(found))


def epsilon_of(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Return the epsilon of a history according to the RDP accountant of opacus."""
    if not history:
        return 0.0
    orders, analysis = _opacus()
    total = sum(steps * np.asarray(divergences(multiplier, rate)) for multiplier, rate, steps in history)
    with warnings.catch_warnings():
        # If the best order is the last one, epsilon is an upper bound that other orders would tighten.
        warnings.simplefilter("ignore", UserWarning)
        epsilon, _ = analysis.get_privacy_spent(orders=orders, rdp=total, delta=delta)
    return float(epsilon)


@functools.lru_cache(maxsize=4096)
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the noise multiplier with which the steps spend at most epsilon, and at least 99.9 % of it."""

    def excess(logarithm: float) -> float:
        found = epsilon_of(((math.exp(logarithm), rate, steps),), delta)
        return math.log(max(found, 1e-12) / (epsilon * (1 - TOLERANCE / 2)))

    low, high = math.log(MIN_NOISE), 0.0
    while excess(high) > 0:
        low, high = high, high + 1.0
        if high > math.log(MAX_NOISE):
            raise OptionError(
                f"epsilon={epsilon:g} at delta={delta:g} is out of reach for {steps} steps at the sample rate {rate:.3g}. "
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
    """The source of noise and samples.

    With the run's seed they are the same in every process and on every machine, and anyone who knows the seed can remove them. The
    system's generator cannot be reproduced; use it in real deployments.
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
    return f"clip must be between {MIN_CLIP:g} and {MAX_CLIP:g}, got {clip!r}"


def require_clip(part: str, clip: object) -> None:
    if problem := clip_problem(clip):
        raise OptionError(f"{part}: {problem}.")


def require_budget(part: str, epsilon: float, delta: float, noise: str, planned_rounds: int) -> None:
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise OptionError(f"{part}: {name} must be a positive number, got {value!r}.")
    if delta >= 1:
        raise OptionError(
            f"{part}: delta must be below 1, and should be well below 1 / (number of protected samples or clients), got {delta!r}."
        )
    require_choice(part, "noise", noise, (SEED, SYSTEM))
    if isinstance(planned_rounds, bool) or not isinstance(planned_rounds, int) or planned_rounds < 0:
        raise OptionError(f"{part}: planned_rounds must be a number of rounds, or 0 for all, got {planned_rounds!r}.")


@dataclass(frozen=True)
class Account(Part):
    """A client's budget and privacy ledger. The history is client state, so a resumed run continues it.

    ``account_key`` is the key in the client's memory; ``whole`` protects the client instead of each sample.
    """

    budget: Budget
    rounds: int
    noise: str
    account_key: str
    whole: bool = False
    reads_data = False

    def rate(self, client: Client) -> float:
        """Return the probability that a sample is in a batch; 1 if whole clients are protected, which use all their data."""
        if self.whole:
            return 1.0
        return min(1.0, client.bench.settings.batch_size / len(client.data.train))

    def steps(self, client: Client) -> int:
        """Return the noisy steps per round: the number of shuffled batches, or 1 if noise is added to the whole update."""
        settings = client.bench.settings
        if self.whole:
            return 1
        if settings.local_steps is not None:
            return settings.local_steps
        return settings.local_epochs * math.ceil(len(client.data.train) / settings.batch_size)

    def multiplier(self, client: Client) -> float:
        return self.budget.multiplier(self.rate(client), (self.rounds or client.rounds) * self.steps(client))

    def history(self, client: Client) -> History:
        found: History = client.memory.get(self.account_key, [])
        return found

    def after_round(self, client: Client) -> History:
        """Return the history after this round. Noise from the system differs per attempt, so every attempt counts."""
        attempts = client.attempt + 1 if self.noise == SYSTEM else 1
        return extended(self.history(client), self.multiplier(client), self.rate(client), attempts * self.steps(client))

    def charge(self, client: Client) -> Charge:
        """Return the cost of this training, whatever round and attempt the server claims."""
        return Charge("clients" if self.whole else "samples", self.multiplier(client), self.rate(client), self.steps(client))

    def randomness(self, client: Client, *names: str | int) -> Randomness:
        return Randomness(self.noise, client.bench.settings.seed, (self.account_key, client.round, client.id, *names))


@dataclass(frozen=True)
class RequireBudget(Account):
    """Decline a round that exceeds the remaining budget."""

    def __call__(self, client: Client) -> None:
        if self.budget.spent(self.after_round(client)) > self.budget.epsilon * (1 + 1e-9):
            spent = self.budget.spent(self.history(client))
            raise Declined(
                f"Client {client.id} does not take part in round {client.round}: it has spent epsilon = {spent:.4g} of "
                f"{self.budget.epsilon:g}, and this round would exceed the budget."
            )
        client.spend(self.charge(client))


@dataclass(frozen=True)
class NoteSpent(Account):
    """Record the cost of the round, and upload the ledger."""

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
    # Replace the value instead of changing it, because the loop restores the old one if the round is repeated.
    server.memory[ACCOUNTS] = {**before, **{client: dict(sent[ACCOUNTS]) for client, sent in extras.items()}}
