"""Hashes of states, by which two runs are compared."""

from __future__ import annotations

from polyfed.core.trees import tree_digest
from polyfed.core.workbench import ClientState


def client_digest(state: ClientState) -> str:
    return tree_digest({"entries": dict(sorted(state.entries.items())), "memory": state.memory})
