"""Learning rate schedules: constant, cosine, and steps."""

from __future__ import annotations

import math

from polyfed.errors import SettingError
from polyfed.text import read_call


def schedule_factor(text: str, round_number: int, rounds: int) -> float:
    """Return the learning rate factor for a round, starting at 1.

    >>> [schedule_factor("steps(at=(0.5, 0.75), factor=0.1)", r, 4) for r in (1, 2, 3, 4)]
    [1.0, 1.0, 0.1, 0.010000000000000002]
    """
    call = read_call(text)
    plain = not call.named and not call.positional
    if call.name == "constant" and plain:
        return 1.0
    if call.name == "cosine" and plain:
        return 0.5 * (1 + math.cos(math.pi * (round_number - 1) / rounds))
    if call.name == "steps" and not call.positional and set(call.named) <= {"at", "factor"}:
        at, factor = call.named.get("at", (0.5, 0.75)), call.named.get("factor", 0.1)
        if isinstance(at, tuple) and isinstance(factor, int | float):
            passed = sum(round_number > share_of(float(share), rounds) for share in at)  # type: ignore[arg-type]
            return math.pow(factor, passed)
    raise SettingError(f"Invalid schedule {text!r}. Choose from: constant, cosine, steps(at=(0.5, 0.75), factor=0.1).")


def share_of(share: float, rounds: int) -> int:
    """Return a fraction of the rounds as an integer, rounded down.

    >>> share_of(0.29, 100)
    29
    """
    return math.floor(share * rounds + 1e-9)
