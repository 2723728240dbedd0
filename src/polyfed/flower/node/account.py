"""The privacy ledger of a node: the privacy budget spent over all runs, in a private file that the server cannot change.

A charge is written to disk before its training starts, so that killed nodes, lost replies and repeated rounds count. All runs use the same
data, so their steps add up. If any run protects single samples only, so does the ledger. A run that protects the whole client then counts
with half its noise, because one sample may move a clipped update by twice the clip.
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

# Keys of a node's configuration.
FILE_KEY, EPSILON_KEY, DELTA_KEY, MIN_SAMPLES_KEY = "privacy-account", "max-total-epsilon", "max-delta", "min-samples"
DEFAULT_DELTA = 1e-5
NO_LIMIT = 0.0
SPENT = "spent"
CLIENTS, SAMPLES = "clients", "samples"


@dataclass(frozen=True)
class NodeAccount:
    """The privacy ledger of one node, in a file."""

    path: Path
    max_epsilon: float = NO_LIMIT  # limit over all runs
    delta: float = DEFAULT_DELTA  # delta for which epsilon is computed

    def spend(self, charge: Charge, client: str, run: str, round_number: int) -> None:
        """Write a charge to disk, unless it would exceed the limit."""

        def line(before: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
            charges = _charges_in(before)
            after = spent_by([*charges, charge], self.delta)
            if self.max_epsilon and after > self.max_epsilon:
                raise Declined(
                    f"{absent}: over all runs it has spent epsilon = {spent_by(charges, self.delta):.4g} of its limit of "
                    f"{self.max_epsilon:g} (max_total_epsilon), and this round would increase it to {after:.4g} at delta = {self.delta:g}."
                )
            where = {"client": client, "run": run, "round": round_number}
            return {**where, **asdict(charge), "epsilon_in_all": after, "delta": self.delta}

        absent = f"Client {client} does not take part in round {round_number}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            AuditLog(self.path).write_after(SPENT, line)
        except OSError as error:
            raise ClientFailure(f"{absent}: cannot write its privacy ledger ({error.strerror or error}).") from error
        except DataError as error:
            raise ClientFailure(f"{absent}: its privacy ledger was changed or damaged. {error}") from error


def counts(facts: Facts) -> bool:
    """Return True if a method's guarantee holds against the server: clients add noise that no other party can reproduce."""
    return facts.noise_at == "client" and facts.noise_from == "system"


def uncounted(method: Method, settings: Settings, question: str, extras: Mapping[str, Any]) -> str:
    """Return the reason why the ledger cannot count everything that a reply leaks, or an empty string."""
    if not counts(method.facts):
        return f"{method} adds no noise that is secret from the server, so its cost cannot be counted"
    row = answered(method, question, extras)
    requested = [row] if row is not None and question != "train" and not row.covered and row != TEST_DATA_ONLY else []
    rows = [*uncovered(method, settings), *requested]
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
    """Return the ledger of a node.

    All clients of a node share one ledger, because client names come from the partition, which the server chooses.
    """
    epsilon, delta = config.get(EPSILON_KEY, NO_LIMIT), config.get(DELTA_KEY, DEFAULT_DELTA)
    if not _is_number(epsilon) or not epsilon >= 0 or not _is_number(delta) or not 0 < delta < 1:
        raise SettingError(
            f"--node-config: {EPSILON_KEY} must be a positive number, or 0 for no limit, and {DELTA_KEY} between 0 and 1; "
            f"got {epsilon!r} and {delta!r}."
        )
    return NodeAccount(Path(str(config.get(FILE_KEY, home / "privacy.jsonl"))).expanduser(), float(epsilon), float(delta))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def account_in(path: Path, delta: float) -> dict[str, Any]:
    """Summarise a privacy ledger, in total and per run."""
    if not 0 < delta < 1:
        raise SettingError(f"delta must be between 0 and 1, got {delta:g}.")
    if not path.is_file():
        raise DataError(f"No privacy ledger at {path}. A node writes it during its first private training.")
    lines = [line for line in verified_lines(path) if line["event"] == SPENT]
    charges = _charges_in(lines)
    runs = {
        run: {
            "trainings": len(selected),
            "epsilon": spent_by(_charges_in(selected), delta),
            "first": selected[0]["time"],
            "last": selected[-1]["time"],
        }
        for run in dict.fromkeys(str(line["run"]) for line in lines)
        if (selected := [line for line in lines if line["run"] == run])
    }
    return {
        "protects": _unit_of(charges),
        "epsilon": spent_by(charges, delta),
        "delta": delta,
        "trainings": len(lines),
        "runs": runs,
    }
