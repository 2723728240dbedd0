"""The roster: maps clients to nodes, and rejects nodes that do not fit the run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message
from flwr.common.constant import ErrorCode

from polyfed.errors import DataError, RunFolderError
from polyfed.flower.wire.descriptions import Description, own_versions, plain_text, split_by_majority
from polyfed.flower.wire.message import DESCRIBE, BadMessage, WireMessage, refusal
from polyfed.flower.wire.records import wire_message_of
from polyfed.flower.wire.transport import Transport
from polyfed.runs.folder.atomic_write import write_atomically

log = logging.getLogger("polyfed")

FILE = "client_names.json"
ADVICE = "Each node needs a different client name."
POLL_SECONDS = 1.0
LONGEST_REASON = 500


class ClientNames:
    """Client names on a SuperLink that identifies nodes only by number.

    A node that registers again gets a new number. It may take over its client name once the previous number is offline.
    """

    numbers_change = True

    def __init__(self, folder: Path | None = None) -> None:
        self.file = None if folder is None else folder / FILE
        self.first: dict[str, str] = _read_names(self.file) if self.file is not None and self.file.exists() else {}

    def node_name(self, node: int) -> str:
        """Return the name of a node, independent of what the node reports."""
        return str(node)

    def owners(self) -> Mapping[str, str]:
        """Return the node name that owns each client name."""
        return self.first

    def claim(self, nodes: Mapping[str, int]) -> None:
        """Record the nodes of these clients, unless another node claimed the name first."""
        for client, node in nodes.items():
            self.first.setdefault(client, self.node_name(node))

    def save(self) -> None:
        if self.file is not None and (not self.file.exists() or _read_names(self.file) != self.first):
            write_atomically(self.file, json.dumps(self.first, indent=1))

    def conflicts(self, claims: Mapping[int, str], online: Collection[int]) -> dict[int, str]:
        """Return the nodes that may not use the client name that they report, with the reason."""
        found = {
            node: f"It reports the client name {client}, which belongs to node {owner}. {ADVICE}"
            for node, client in claims.items()
            if (owner := self.other_owner(node, client, online))
        }
        for client in set(claims.values()):
            rivals = [node for node in claims if claims[node] == client and node not in found]
            if len(rivals) > 1:
                listed = " and ".join(map(self.node_name, rivals))
                found |= dict.fromkeys(
                    rivals, f"Nodes {listed} all report the client name {client}, so none of them takes part. {ADVICE}"
                )
        return found

    def other_owner(self, node: int, client: str, online: Collection[int]) -> str:
        owner = self.owners().get(client, "")
        if owner == self.node_name(node) or (self.numbers_change and owner not in map(self.node_name, online)):
            return ""
        return owner


def _read_names(file: Path) -> dict[str, str]:
    try:
        return {str(client): str(node) for client, node in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(f"Cannot read {file} ({error}). Restore it from a backup.") from error


class NodeDisconnected(BadMessage):
    """The node missed its heartbeats; it may reconnect at any moment."""


@dataclass
class Roster:
    """The nodes of a run and their descriptions, by client."""

    transport: Transport
    timeout: float = 300.0  # seconds a node may take to describe itself
    patience: float = 120.0  # seconds to wait for a disconnected node
    own_model: bool = False  # True if the run trains the default model of the data, on which nodes must then agree
    names: ClientNames = field(default_factory=ClientNames)
    nodes: dict[str, int] = field(default_factory=dict)
    described: dict[str, Description] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def gather(self, least: int, limit: float, wanted: Collection[str] = ()) -> list[Description]:
        """Wait for enough nodes and return the descriptions of those that take part.

        A resumed run needs exactly its previous clients (``wanted``).
        """
        found, problems = self._await(least, limit, wanted)
        found, misfits = split_by_majority(found, self.own_model) if found else (found, {})
        problems |= misfits
        self.refused |= set(misfits)
        for node, problem in problems.items():
            log.warning("Node %s cannot take part: %s", self.names.node_name(node), problem)
        if len(found) < least:
            raise DataError(f"{len(found)} of {least} nodes can take part. {' '.join(problems.values())}")
        for node, described in found.items():
            if wanted and described.client not in wanted:
                self._reject(node, f"{described.client} is not a client of the run that is resumed.")
        chosen = {node: described for node, described in found.items() if node not in self.refused}
        mine = own_versions()["torch"]
        if other := [f"{node.client} ({node.torch or 'unknown'})" for node in chosen.values() if node.torch != mine]:
            log.warning("The server has torch %s, but %s differ: weights will differ in the last bits.", mine, ", ".join(other))
        self.nodes = {described.client: node for node, described in chosen.items()}
        self.described = {described.client: described for described in chosen.values()}
        self.names.claim(self.nodes)
        return list(chosen.values())

    def _reject(self, node: int, reason: str) -> None:
        self.refused.add(node)
        log.warning("Node %s was rejected: %s", self.names.node_name(node), reason)

    def _await(self, least: int, limit: float, wanted: Collection[str]) -> tuple[dict[int, Description], dict[int, str]]:
        """Wait for enough nodes, and return the descriptions of the usable ones and the problems of the others."""
        end = time.monotonic() + limit
        known: dict[int, Description] = {}
        problems: dict[int, str] = {}
        while True:
            online = sorted(self.transport.grid.get_node_ids())
            new = [node for node in online if node not in known and node not in problems]
            away: dict[int, str] = {}
            if new and len(online) >= least:
                described, failed, away = self.describe(new)
                known, problems = known | described, problems | failed
            found = {node: known[node] for node in online if node in known}
            conflicts = self.names.conflicts({node: described.client for node, described in found.items()}, online)
            found = {node: described for node, described in found.items() if node not in conflicts}
            missing = sorted(set(wanted) - {described.client for described in found.values()})
            timed_out = time.monotonic() > end
            if len(online) >= least and not missing and (timed_out or not away or len(found) >= least):
                self.refused |= set(conflicts)
                return found, problems | conflicts | away
            if timed_out and len(online) < least:
                raise DataError(
                    f"{len(online)} of {least} nodes were connected after {limit:g} seconds. Start the others, wait longer "
                    f"(--run-config 'wait=600') or require fewer (--run-config 'min-nodes={max(1, len(online))}')."
                )
            if timed_out:
                raise DataError(
                    f"Cannot resume: {len(missing)} of {len(wanted)} clients did not connect within {limit:g} seconds: "
                    f"{', '.join(missing)}. {' '.join({**problems, **conflicts, **away}.values())} Start their nodes, wait longer "
                    "(--run-config 'wait=600'), or start a new run with another out."
                )
            time.sleep(POLL_SECONDS)

    def describe(self, nodes: Sequence[int]) -> tuple[dict[int, Description], dict[int, str], dict[int, str]]:
        """Request descriptions; return those received, the problems, and the nodes that disconnected meanwhile."""
        sent = self.transport.send(
            {node: WireMessage({"what": DESCRIBE, "versions": own_versions()}) for node in nodes}, "query", "describe", self.timeout
        )
        found: dict[int, Description] = {}
        problems: dict[int, str] = {}
        away: dict[int, str] = {}
        for node in nodes:
            try:
                reply = read_reply(self.transport.wait(sent[node]), node, self.timeout)
                if not reply.control.get("ok"):
                    raise BadMessage(reason_in(reply.control.get("problem")))
                found[node] = Description.read(reply.control.get("description"))
            except NodeDisconnected as error:
                away[node] = str(error)
            except BadMessage as error:
                problems[node] = str(error)
        return found, problems, away

    def present(self, clients: Collection[str], insist: bool) -> dict[str, int]:
        """Return the nodes of those clients that are connected.

        The first time a node is missing, wait up to ``patience`` seconds for it; later only if ``insist``.
        """
        end = time.monotonic() + self.patience
        while True:
            online = set(self.transport.grid.get_node_ids())
            self._admit(online - set(self.nodes.values()) - self.refused, online)
            self.refused &= online
            absent = {client for client in clients if self.nodes[client] not in online}
            self.given_up &= absent
            if not absent or (absent <= self.given_up and not insist):
                break
            if time.monotonic() >= end:
                self.given_up |= absent
                break
            time.sleep(POLL_SECONDS)
        for client in sorted(absent):
            log.warning("Client %s is skipped: its node is not connected.", client)
        return {client: self.nodes[client] for client in clients if client not in absent}

    def _admit(self, new: Collection[int], online: Collection[int]) -> None:
        """Admit nodes that returned under another number, and reject all others until the next run."""
        if not new:
            return
        found, problems, _ = self.describe(sorted(new))
        for node, described in found.items():
            if self.described.get(described.client) != described:
                problems[node] = f"{described.client} is not a client of this run, or its data has changed"
        known = {node: described for node, described in found.items() if node not in problems}
        problems |= self.names.conflicts({node: described.client for node, described in known.items()}, online)
        for node, described in known.items():
            # The first owner of a name may always return, another node only while the name is unused.
            is_free = self.nodes[described.client] not in online
            is_owner = self.names.owners().get(described.client) == self.names.node_name(node)
            if node not in problems and (is_free or is_owner):
                log.info("Client %s has reconnected.", described.client)
                self.nodes[described.client] = node
            else:
                problems.setdefault(node, f"{described.client} is already connected")
        for node, reason in problems.items():
            self._reject(node, reason)


def read_reply(message: Message | None, node: int, timeout: float) -> WireMessage:
    if message is None:
        raise BadMessage(f"it did not reply within {timeout:g} seconds")
    if message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE:
        raise NodeDisconnected(f"it was not connected when the request was sent: {reason_in(message.error.reason)}")
    if message.has_error():
        return refusal(f"it replied with an error ({message.error.code}): {reason_in(message.error.reason)}")
    if message.metadata.src_node_id != node:
        raise BadMessage("the reply came from another node")
    return wire_message_of(message.content)


def reason_in(text: object) -> str:
    """Shorten a reason given by a node for the log, and remove control characters."""
    return plain_text(str(text)[:LONGEST_REASON])
