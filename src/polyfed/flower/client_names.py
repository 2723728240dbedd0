"""Whose a client's name is. Nodes name themselves, so several may say the same; neither their word nor their numbers decide then.

Who has had a name keeps it for the whole run, also when the run goes on. Of several that claim a name nobody has had, none gets it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from polyfed.errors import RunFolderError
from polyfed.runs.atomic_write import write_atomically

FILE = "client_names.json"


class ClientNames:
    """Names on a SuperLink that knows nodes by their numbers only.

    A node that registers again comes back under another number. It may take its place while the number that had the name is gone.

    Args:
        folder: of the run, where it is remembered who had which name; None: nowhere.
    """

    numbers_change = True

    def __init__(self, folder: Path | None = None) -> None:
        self.file = None if folder is None else folder / FILE
        self.first: dict[str, str] = read_names(self.file) if self.file is not None and self.file.exists() else {}

    def known_as(self, node: int) -> str:
        """By what a node is known, whatever it calls itself."""
        return str(node)

    def holders(self) -> Mapping[str, str]:
        """Who has which name."""
        return self.first

    def take(self, nodes: Mapping[str, int]) -> None:
        """These nodes take part under these names; who had one first keeps it."""
        for client, node in nodes.items():
            self.first.setdefault(client, self.known_as(node))

    def remember(self) -> None:
        """Write down who has which name, for a run that goes on."""
        if self.file is not None and (not self.file.exists() or read_names(self.file) != self.first):
            write_atomically(self.file, json.dumps(self.first, indent=1))

    def problems(self, claims: Mapping[int, str], online: Collection[int]) -> dict[int, str]:
        """Why nodes may not have the names that they claim.

        Args:
            claims: names by node.
            online: nodes that are connected.
        """
        others = {node: self.other_holder(node, client, online) for node, client in claims.items()}
        found = {
            node: f"It calls itself {claims[node]}, which is the name of node {holder}. {ADVICE}"
            for node, holder in others.items()
            if holder
        }
        for client in set(claims.values()):
            rivals = [node for node in claims if claims[node] == client and node not in found]
            if len(rivals) > 1:
                named = " and ".join(self.known_as(node) for node in rivals)
                why = (
                    f"Nodes {named} call themselves {client}. Nobody can say whose name it is, so none of them takes part. {ADVICE}"
                )
                found |= dict.fromkeys(rivals, why)
        return found

    def other_holder(self, node: int, client: str, online: Collection[int]) -> str:
        """Who else has the name that a node claims; empty: nobody."""
        holder = self.holders().get(client, "")
        if holder == self.known_as(node):
            return ""
        has_gone = self.numbers_change and holder not in map(self.known_as, online)
        return "" if has_gone else holder


ADVICE = "Each node needs a client's name of its own."


def read_names(file: Path) -> dict[str, str]:
    """Who had which name, from the file of a run."""
    try:
        return {str(client): str(node) for client, node in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}). Put back a copy of it.") from error
