"""Measure cost and privacy relative to FedAvg, with the columns of gPerXAN's Table 1: uploads, communication and computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyfed.runs.costs import Costs

REFERENCE = "fedavg"
HEADS = ("uploaded once", "uploaded per round", "granularity", "extra MB", "extra CPU s", "extra peak MB")
NOT_KNOWN = "?"
NOISY_MEMORY = 10
"""Two runs of one method in one process differed by less than this, in MB."""

NOTE = (
    "uploaded: bytes per client that are not model entries, before round 1 and per round; compressed model entries are excluded. "
    "granularity: declared by the method. extra MB: additional training traffic, up and down, per client and round. "
    "extra CPU s: additional CPU seconds of training per round, and the ratio to the reference. extra peak MB: additional peak memory of the "
    "simulation during training, with the peaks of worker processes added up. All columns exclude evaluation. Bytes are exact. CPU time "
    "and memory are noisy: "
    f"differences below 20 % or {NOISY_MEMORY} MB are not significant, and values from different machines are not comparable."
)


@dataclass(frozen=True)
class Totals:
    """The costs of one run, summed over clients and rounds; None if not measured."""

    clients: int
    rounds: int
    client_rounds: int
    left_once: int | None
    left_in_rounds: int | None
    traffic: int
    cpu_seconds: float | None
    memory: int | None


@dataclass(frozen=True)
class Spent:
    """The average costs of a method over its runs; None if not measured.

    Attributes:
        left_once: Bytes per client, uploaded before round 1, that are not model entries.
        left_a_round: Bytes per client and round that are not model entries.
        traffic: Bytes up and down per client and round; those before round 1 are spread over the rounds.
        cpu_seconds: CPU seconds of training per round.
        memory: Bytes by which training raised the peak memory of the process.
    """

    left_once: float | None = None
    left_a_round: float | None = None
    traffic: float | None = None
    cpu_seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Expense:
    """The costs of a method relative to the reference; None if not measured or without a reference."""

    method: str
    data_derived_uploads: str
    granularity: str
    spent: Spent
    reference: Spent | None = None

    def _extra(self, name: str) -> float | None:
        cost, reference = getattr(self.spent, name), getattr(self.reference or Spent(), name)
        return None if cost is None or reference is None else cost - reference

    @property
    def extra_traffic(self) -> float | None:
        return self._extra("traffic")

    @property
    def extra_cpu(self) -> float | None:
        return self._extra("cpu_seconds")

    @property
    def extra_memory(self) -> float | None:

        return self._extra("memory")

    @property
    def cpu_ratio(self) -> float | None:

        other = None if self.reference is None else self.reference.cpu_seconds
        return self.spent.cpu_seconds / other if self.spent.cpu_seconds is not None and other else None

    @property
    def left(self) -> float:

        return (self.spent.left_once or 0) + (self.spent.left_a_round or 0)

    @property
    def is_counted(self) -> bool:
        """Return True if messages contain the uploads; data that is pooled without a message is not counted."""
        return not self.data_derived_uploads or self.left > 0


def totals(costs: Costs, clients: int, sampled: int, rounds: int) -> Totals:
    """Return the totals of a run in which ``sampled`` of ``clients`` clients took part in each round."""
    once, in_rounds = costs.left_clients()
    return Totals(
        clients=clients,
        rounds=rounds,
        client_rounds=sampled * rounds,
        left_once=once,
        left_in_rounds=in_rounds,
        traffic=costs.total("up") + costs.total("down"),
        cpu_seconds=costs.cpu_seconds.get("training"),
        memory=costs.memory.get("increase"),
    )


def spent(runs: Sequence[Totals]) -> Spent:
    turns = [run.client_rounds for run in runs]
    return Spent(
        left_once=_rate((run.left_once for run in runs), [run.clients for run in runs]),
        left_a_round=_rate((run.left_in_rounds for run in runs), turns),
        traffic=_rate((run.traffic for run in runs), turns),
        cpu_seconds=_rate((run.cpu_seconds for run in runs), [run.rounds for run in runs]),
        memory=_rate((run.memory for run in runs), [1] * len(runs)),
    )


def _rate(amounts: Iterable[float | None], times: Sequence[int]) -> float | None:
    found, whole = list(amounts), sum(times)
    known = [amount for amount in found if amount is not None]
    return sum(known) / whole if whole and len(known) == len(found) else None


def cost_json(row: Expense) -> dict[str, str | float | None]:
    return {
        "data_derived_uploads": row.data_derived_uploads or None,
        "granularity": row.granularity or None,
        "left_once_bytes_per_client": row.spent.left_once if row.is_counted else None,
        "left_bytes_per_client_and_round": row.spent.left_a_round if row.is_counted else None,
        "bytes_per_client_and_round": row.spent.traffic,
        "extra_bytes_per_client_and_round": row.extra_traffic,
        "cpu_seconds_per_round": row.spent.cpu_seconds,
        "extra_cpu_seconds_per_round": row.extra_cpu,
        "cpu_ratio": row.cpu_ratio,
        "peak_memory_increase_bytes": row.spent.memory,
        "extra_peak_memory_bytes": row.extra_memory,
    }


def cells(row: Expense) -> list[str]:
    """Return the table cells under ``HEADS``."""
    cpu = NOT_KNOWN if row.extra_cpu is None else f"{row.extra_cpu:+.2f}"
    return [
        _format_upload(row, row.spent.left_once),
        _format_upload(row, row.spent.left_a_round),
        row.granularity or ("not declared" if row.data_derived_uploads or row.left else "–"),
        NOT_KNOWN if row.extra_traffic is None else megabytes(row.extra_traffic),
        cpu if row.cpu_ratio is None else f"{cpu} ({row.cpu_ratio:.2f}x)",
        NOT_KNOWN if row.extra_memory is None else f"{round(row.extra_memory / 1e6):+d}",
    ]


def _format_upload(row: Expense, count: float | None) -> str:
    if count is None:
        return NOT_KNOWN
    return f"{count:,.0f} B" if row.is_counted else "not counted"


def megabytes(more: float) -> str:
    """Format a difference in MB, or in bytes if it is small.

    >>> megabytes(870240), megabytes(-60), megabytes(0)
    ('+0.870', '-60 B', '+0.000')
    """
    return f"{more:+.0f} B" if 0 < abs(more) < 500 else f"{more / 1e6:+.3f}"


def describe_reference(costs: Spent) -> str:
    measured = (
        (costs.traffic, 1e6, "{:.3f} MB per client and round"),
        (costs.cpu_seconds, 1.0, "{:.2f} CPU seconds per round"),
        (costs.memory, 1e6, "a peak of {:.0f} MB"),
    )
    parts = [template.format(value / unit) for value, unit, template in measured if value is not None]
    return f"{REFERENCE} itself: {', '.join(parts)}." if parts else f"The costs of {REFERENCE} were not measured."
