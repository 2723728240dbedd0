"""Cost and privacy beside FedAvg: what leaves clients beyond model entries, and what a method needs more in the same comparison.

The columns are those of gPerXAN's Table 1 (privacy risk, additional communication, additional computation), measured instead of judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyfed.runs.costs import Costs

REFERENCE = "fedavg"
HEADS = ("left once", "left a round", "granularity", "extra MB", "extra CPU s", "extra peak MB")
"""The columns of the table, after the method."""
NOT_KNOWN = "?"
NOISY_MEMORY = 10
"""Two runs of one method in one process differed by less than this, in MB."""

NOTE = (
    "left: bytes up in training that are no model entries, by client: before round 1, and in each round; compressed model entries are not among "
    "them. granularity: declared by the method. extra MB: all training traffic, up and down, by client and round. "
    "extra CPU s: CPU seconds of training by round, and how many times the reference. extra peak MB: the highest memory of the "
    "simulating process in training, above what it held before. Evaluations are left out of all. Bytes are exact; seconds and memory "
    f"are noisy: less than a fifth, or less than {NOISY_MEMORY} MB, says nothing, nor does a comparison between machines."
)


@dataclass(frozen=True)
class Totals:
    """What one run cost, summed over clients and rounds; None: not measured."""

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
    """What a method costs, over its runs; None: not measured.

    Attributes:
        left_once: bytes a client sent before round 1 that are no model entries.
        left_a_round: such bytes by client and round.
        traffic: bytes up and down by client and round, those before round 1 spread over the rounds.
        cpu_seconds: of training by round.
        memory: bytes by which training raised the memory of the process at its highest.
    """

    left_once: float | None = None
    left_a_round: float | None = None
    traffic: float | None = None
    cpu_seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Expense:
    """A method relative to the reference; what was not measured, or has no reference, is None."""

    method: str
    data_derived_uploads: str
    granularity: str
    spent: Spent
    reference: Spent | None = None

    def _more(self, what: str) -> float | None:
        own, other = getattr(self.spent, what), getattr(self.reference or Spent(), what)
        return None if own is None or other is None else own - other

    @property
    def extra_traffic(self) -> float | None:
        return self._more("traffic")

    @property
    def extra_cpu(self) -> float | None:
        return self._more("cpu_seconds")

    @property
    def extra_memory(self) -> float | None:
        """More bytes of memory at the peak."""
        return self._more("memory")

    @property
    def cpu_ratio(self) -> float | None:
        """How many times the reference's CPU seconds."""
        other = None if self.reference is None else self.reference.cpu_seconds
        return self.spent.cpu_seconds / other if self.spent.cpu_seconds is not None and other else None

    @property
    def left(self) -> float:
        """Bytes that left a client, once and in a round together."""
        return (self.spent.left_once or 0) + (self.spent.left_a_round or 0)

    @property
    def is_counted(self) -> bool:
        """Whether what leaves is seen in messages; data that are pooled without one are not."""
        return not self.data_derived_uploads or self.left > 0


def totals(costs: Costs, clients: int, sampled: int, rounds: int) -> Totals:
    """What the costs say of a run of ``clients`` clients, of whom ``sampled`` took part in each round."""
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
    """What a method costs over its runs."""
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
    """A row as texts under ``HEADS``."""
    cpu = NOT_KNOWN if row.extra_cpu is None else f"{row.extra_cpu:+.2f}"
    return [
        left_words(row, row.spent.left_once),
        left_words(row, row.spent.left_a_round),
        row.granularity or ("not declared" if row.data_derived_uploads or row.left else "–"),
        NOT_KNOWN if row.extra_traffic is None else megabytes(row.extra_traffic),
        cpu if row.cpu_ratio is None else f"{cpu} ({row.cpu_ratio:.2f}x)",
        NOT_KNOWN if row.extra_memory is None else f"{round(row.extra_memory / 1e6):+d}",
    ]


def left_words(row: Expense, count: float | None) -> str:
    if count is None:
        return NOT_KNOWN
    return f"{count:,.0f} B" if row.is_counted else "not counted"


def megabytes(more: float) -> str:
    """A difference in MB; one too small for that in bytes.

    >>> megabytes(870240), megabytes(-60), megabytes(0)
    ('+0.870', '-60 B', '+0.000')
    """
    return f"{more:+.0f} B" if 0 < abs(more) < 500 else f"{more / 1e6:+.3f}"


def reference_words(own: Spent) -> str:
    """What the reference itself costs, in a sentence."""
    measured = (
        (own.traffic, 1e6, "{:.3f} MB by client and round"),
        (own.cpu_seconds, 1.0, "{:.2f} CPU seconds a round"),
        (own.memory, 1e6, "a peak of {:.0f} MB"),
    )
    parts = [words.format(value / unit) for value, unit, words in measured if value is not None]
    return f"{REFERENCE} itself: {', '.join(parts)}." if parts else f"{REFERENCE} itself was not measured."
