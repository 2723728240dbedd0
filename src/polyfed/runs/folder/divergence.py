"""Record in the run folder that a run diverged, as the last line of the metrics.

The line follows the newest checkpoint, so resuming the run removes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyfed.errors import format_divergence

if TYPE_CHECKING:
    from polyfed.runs.folder.run_folder import RunFolder

DIVERGED = "diverged"
"""View of the line."""


@dataclass(frozen=True)
class Divergence:
    """The end of a run that diverged.

    Attributes:
        round: Round in which a loss, weight or prediction became NaN or infinite.
        client: The client, ``all``, or an empty string if it is unknown.
        suggested_lr: A third of the learning rate of the run.
    """

    round: int
    client: str
    suggested_lr: float

    @property
    def words(self) -> str:
        return format_divergence(self.round, self.client)

    @property
    def remedy(self) -> str:
        return f"Resuming it gives the same result. Train it again with a lower learning rate: --lr {self.suggested_lr:g}."

    def as_line(self) -> dict[str, Any]:
        return {"round": self.round, "view": DIVERGED, "client": self.client, "suggested_lr": self.suggested_lr}

    def as_json(self) -> dict[str, Any]:
        return {"round": self.round, "client": self.client or None, "suggested_lr": self.suggested_lr}


def read_divergence(folder: RunFolder) -> Divergence | None:
    """Return the divergence that ended a run, if any. No checkpoint seals it, so a damaged line counts as none."""
    try:
        line: Mapping[str, Any] = json.loads(folder.metrics_file.read_bytes().splitlines()[-1])
        if line["view"] != DIVERGED:
            return None
        return Divergence(int(line["round"]), str(line["client"]), float(line["suggested_lr"]))
    except (OSError, IndexError, KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return None
