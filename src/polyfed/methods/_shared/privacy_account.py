"""A client's account of differential privacy: what it may spend, what it has spent, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.core.client import Client
from polyfed.core.extras import Number, Record
from polyfed.core.privacy import ACCOUNTS, Charge
from polyfed.core.server import Server
from polyfed.errors import Declined
from polyfed.methods._shared.privacy_budget import SYSTEM, Budget, History, Randomness, extended

ACCOUNT_UPLOADS = "its account (epsilon spent, steps, noise and sample rate: a few numbers per round)"
ACCOUNT = Record(
    {
        "epsilon_spent": Number(least=0),
        "epsilon": Number(least=0),
        "delta": Number(least=0, most=1),
        "noise_multiplier": Number(least=0),
        "sample_rate": Number(least=0, most=1),
        "steps": Number(least=0, whole=True),
    }
)


@dataclass(frozen=True)
class Account:
    """A client's budget and what it has spent. The history is part of what the client keeps, so a resumed run goes on with it.

    ``key`` is its place in the client's memory; ``whole``: what is protected is the client, not each of its samples.
    """

    budget: Budget
    rounds: int
    noise: str
    key: str
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
        found: History = client.memory.get(self.key, [])
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
        return Randomness(self.noise, client.bench.settings.seed, (self.key, client.round, client.id, *names))


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

    notes_account = True

    def __call__(self, client: Client) -> Mapping[str, Any]:
        history = self.after_round(client)
        client.memory[self.key] = history
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
    """Remember what every client says that it has spent."""
    before: Mapping[str, Any] = server.remember(ACCOUNTS, dict)
    # A new value, not a changed one: the loop puts the old one back when the round is repeated.
    server.memory[ACCOUNTS] = {**before, **{client: dict(sent[ACCOUNTS]) for client, sent in extras.items()}}
