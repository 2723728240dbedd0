"""Records of a ledger without any training."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyfed.core.method import parse
from polyfed.papers.ledger import DIVERGED, FINISHED, Record, identity_of, packed_bits, recorded_settings
from polyfed.papers.recording import command_of
from polyfed.settings import Settings


def made_record(method: str, seed: int, accuracy: float, right: list[bool] | None = None, **settings: Any) -> Record:
    """A run on two domains with this accuracy; NaN makes it a diverged one."""
    chosen = Settings(method=method, seed=seed, **settings)
    finished = accuracy == accuracy
    scores = [{"view": "seen", "domain": domain, "clients": 1, "count": 100, "accuracy": accuracy} for domain in ("a", "b")]
    bits = (
        []
        if right is None
        else [{"view": "seen", "client": "a", "domain": "a", "count": len(right), "bits": packed_bits(np.array(right))}]
    )
    rounds = list(range(1, chosen.rounds + 1))
    return Record(
        identity=identity_of(chosen),
        seed=seed,
        state=FINISHED if finished else DIVERGED,
        settings=recorded_settings(chosen),
        method=parse(method).full_text,
        command=command_of(chosen),
        commit="c" * 40,
        versions={"python": "3.11"},
        machine="x86_64",
        digest=f"{hash((method, seed, accuracy)) % 16**12:012x}" if finished else "",
        cost={"cpu_seconds": 36.0},
        rounds=chosen.rounds,
        selected_round=chosen.rounds if finished else None,
        scores=scores if finished else [],
        validation={"rounds": rounds, "accuracy": [round(accuracy * number / chosen.rounds, 4) for number in rounds]}
        if finished
        else {},
        right=bits if finished else [],
        error="" if finished else "the loss became nan in round 2",
    )
