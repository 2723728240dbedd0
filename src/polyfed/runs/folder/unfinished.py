"""Describe why a run has no final state: it is unfinished, it diverged, or its newest checkpoint is damaged."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.divergence import Divergence, read_divergence
from polyfed.runs.folder.run_folder import RunFolder


@dataclass(frozen=True)
class Unfinished:
    """A run without a final state.

    Attributes:
        path: The run folder.
        state: Round of its newest good state; empty if no checkpoint is readable.
        damage: Message about its newest checkpoint if it is damaged, otherwise empty.
        divergence: Where the run diverged, if it did.
    """

    path: str
    state: str
    damage: str = ""
    divergence: Divergence | None = None

    @property
    def remedy(self) -> str:
        if not self.state:
            return "Restore it from a backup, or train it again with another --out."
        return f"Resume it with: polyfed resume {shlex.quote(self.path)}." if self.divergence is None else self.divergence.remedy

    @property
    def problem(self) -> str:
        if not self.state:
            return f"{self.damage} {self.path} has no good checkpoint."
        if self.damage:
            return f"{self.damage} The newest good state of {self.path} is that of {self.state}."
        if self.divergence is not None:
            return f"{self.path} {self.divergence.words}. Its newest good state is that of {self.state}."
        return f"{self.path} is unfinished. Its newest state is that of {self.state}."

    @property
    def refusal(self) -> str:
        allow = "To use the run as it is, pass --allow-unfinished (in Python: allow_unfinished=True)."
        return f"{self.problem} {self.remedy} {allow}"

    @property
    def warning(self) -> str:
        """The warning next to results of this state. It does not name the folder, because exported files contain it."""
        where = "" if self.divergence is None else self.divergence.words
        reason = "its newest state is damaged" if self.damage else where or "it is unfinished"
        return f"This is the state of {self.state}, not the final state of the run: {reason}."


def describe_unfinished(folder: RunFolder, snapshot: Snapshot | None, complaints: Sequence[str]) -> Unfinished | None:
    """Return why the newest good checkpoint of a run is not its final state; None if it is."""
    if snapshot is not None and snapshot.notes.get("finished"):
        return None
    state = "" if snapshot is None and complaints else f"round {snapshot.round if snapshot else 0} of {folder.settings().rounds}"
    if complaints:
        return Unfinished(str(folder.path), state, complaints[0])
    return Unfinished(str(folder.path), state, divergence=read_divergence(folder))
