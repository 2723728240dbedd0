"""A node's own privacy account: what its trainings have spent, over all runs, in a private file that the server cannot change.

A training is written down before it begins, and is on the disk before anything of it can leave. So a node that is killed, a reply that is
lost, and a round that is asked for again with new noise are all counted. The node works the charge out itself: what the server says
of rounds, attempts and states does not make it smaller.

All runs work on the same data, so their steps add up. A sum of promises is as wide as the narrowest: where one run protects samples only,
the account is of samples. A run that protects the whole client then counts with half its noise, since one sample more or less may move
a clipped update by twice the clip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyfed.core.method import Facts, Method
from polyfed.core.privacy import TEST_DATA_ONLY, Charge, answered, uncovered
from polyfed.errors import ClientFailure, DataError, Declined, SettingError
from polyfed.methods._shared.privacy_budget import epsilon_of
from polyfed.runs.folder.audit_log import AuditLog, verified_lines
from polyfed.settings import Settings

FILE_KEY, EPSILON_KEY, DELTA_KEY = "privacy-account", "max-total-epsilon", "max-delta"
MIN_SAMPLES_KEY = "min-samples"
"""Keys of a node's configuration."""
USUAL_DELTA = 1e-5
NO_LIMIT = 0.0
SPENT = "spent"
CLIENTS, SAMPLES = "clients", "samples"


@dataclass(frozen=True)
class NodeAccount:
    """The account of one node, in a file."""

    path: Path
    max_epsilon: float = NO_LIMIT  # what the node may spend over all runs
    delta: float = USUAL_DELTA  # at which epsilon is stated

    def spend(self, charge: Charge, client: str, run: str, round_number: int) -> None:
        """Write down a charge, or decline it; when this returns, it is on the disk."""

        def line(before: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
            charges = _charges_in(before)
            after = spent_by([*charges, charge], self.delta)
            if self.max_epsilon and after > self.max_epsilon:
                raise Declined(
                    f"{absent}: over all runs it has spent epsilon = {spent_by(charges, self.delta):.4g} of the {self.max_epsilon:g} "
                    f"that its own account allows (max_total_epsilon), and this round would take it to {after:.4g} "
                    f"at delta = {self.delta:g}."
                )
            about = {"client": client, "run": run, "round": round_number}
            return {**about, **asdict(charge), "epsilon_in_all": after, "delta": self.delta}

        absent = f"Client {client} takes no part in round {round_number}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            AuditLog(self.path).write_after(SPENT, line)
        except OSError as error:
            raise ClientFailure(f"{absent}: its privacy account cannot be written ({error.strerror or error}).") from error
        except DataError as error:
            raise ClientFailure(f"{absent}: its privacy account was changed or damaged. {error}") from error


def counts(facts: Facts) -> bool:
    """Whether a method's promise holds against the server, so that a node can count it: noise of its own, which nobody can repeat."""
    return facts.noise_at == "client" and facts.noise_from == "system"


def uncounted(method: Method, settings: Settings, question: str, extras: Mapping[str, Any]) -> str:
    """Why an account cannot count all that the answer to a question of a method lets out; empty: it can."""
    if not counts(method.facts):
        return f"{method} adds no noise that the server cannot take off, so nothing could be counted"
    own = answered(method, question, extras)
    asked = [own] if own is not None and question != "train" and not own.covered and own != TEST_DATA_ONLY else []
    rows = [*uncovered(method, settings), *asked]
    return f"{method} also sends {rows[0].what}, which no noise covers ({rows[0].why})" if rows else ""


def _charges_in(lines: Iterable[Mapping[str, Any]]) -> list[Charge]:
    names = ("protects", "noise_multiplier", "sample_rate", "steps")
    return [Charge(**{name: line[name] for name in names}) for line in lines if line["event"] == SPENT]


def _unit_of(charges: Iterable[Charge]) -> str:
    return CLIENTS if all(charge.protects == CLIENTS for charge in charges) else SAMPLES


def spent_by(charges: Iterable[Charge], delta: float) -> float:
    charges = list(charges)
    unit = _unit_of(charges)
    history: dict[tuple[float, float], int] = {}
    for charge in charges:
        noise = charge.noise_multiplier / (2 if charge.protects == CLIENTS and unit == SAMPLES else 1)
        history[noise, charge.sample_rate] = history.get((noise, charge.sample_rate), 0) + charge.steps
    return epsilon_of(tuple((noise, rate, steps) for (noise, rate), steps in history.items()), delta)


def account_of(config: Mapping[str, Any], home: Path) -> NodeAccount:
    """The account that a node's configuration names, or the one of its folder.

    One for all that is trained from that folder: the name of a client comes from the partition, which the server chooses.
    """
    most, delta = config.get(EPSILON_KEY, NO_LIMIT), config.get(DELTA_KEY, USUAL_DELTA)
    if not _is_number(most) or not most >= 0 or not _is_number(delta) or not 0 < delta < 1:
        raise SettingError(
            f"--node-config: {EPSILON_KEY} takes a positive number, or 0 for no limit, and {DELTA_KEY} one between 0 and 1; "
            f"found {most!r} and {delta!r}."
        )
    return NodeAccount(Path(str(config.get(FILE_KEY, home / "privacy.jsonl"))).expanduser(), float(most), float(delta))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def account_in(path: Path, delta: float) -> dict[str, Any]:
    """What an account says: in all, and by run."""
    if not 0 < delta < 1:
        raise SettingError(f"delta must lie between 0 and 1, found {delta:g}.")
    if not path.is_file():
        raise DataError(f"There is no privacy account {path}. A node writes one with its first private training.")
    lines = [line for line in verified_lines(path) if line["event"] == SPENT]
    charges = _charges_in(lines)
    runs = {
        run: {
            "trainings": len(own),
            "epsilon": spent_by(_charges_in(own), delta),
            "first": own[0]["time"],
            "last": own[-1]["time"],
        }
        for run in dict.fromkeys(str(line["run"]) for line in lines)
        if (own := [line for line in lines if line["run"] == run])
    }
    return {
        "protects": _unit_of(charges),
        "epsilon": spent_by(charges, delta),
        "delta": delta,
        "trainings": len(lines),
        "runs": runs,
    }
