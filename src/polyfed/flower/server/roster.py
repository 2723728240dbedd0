"""The roster: which node is which client. Nodes describe themselves; those that do not fit together are left out by name."""

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
from polyfed.flower.wire.descriptions import Description, own_versions, plain_text, those_that_fit
from polyfed.flower.wire.message import DESCRIBE, BadMessage, WireMessage, refusal
from polyfed.flower.wire.records import wire_message_of
from polyfed.flower.wire.transport import Transport
from polyfed.runs.folder.atomic_write import write_atomically

log = logging.getLogger("polyfed")

FILE = "client_names.json"
ADVICE = "Each node needs a client's name of its own."
LOOK_AGAIN = 1.0
LONGEST_REASON = 500


class ClientNames:
    """Names on a SuperLink that knows nodes by their numbers only.

    A node that registers again comes back under another number. It may take its place while the number that had the name is gone. Who
    had which name is remembered in the folder of the run, if there is one.
    """

    numbers_change = True

    def __init__(self, folder: Path | None = None) -> None:
        self.file = None if folder is None else folder / FILE
        self.first: dict[str, str] = _read_names(self.file) if self.file is not None and self.file.exists() else {}

    def known_as(self, node: int) -> str:
        """By what a node is known, whatever it calls itself."""
        return str(node)

    def holders(self) -> Mapping[str, str]:
        return self.first

    def take(self, nodes: Mapping[str, int]) -> None:
        """These nodes take part under these names; who had one first keeps it."""
        for client, node in nodes.items():
            self.first.setdefault(client, self.known_as(node))

    def remember(self) -> None:
        """Write down who has which name, for a run that goes on."""
        if self.file is not None and (not self.file.exists() or _read_names(self.file) != self.first):
            write_atomically(self.file, json.dumps(self.first, indent=1))

    def problems(self, claims: Mapping[int, str], online: Collection[int]) -> dict[int, str]:
        """Why nodes may not have the names that they claim."""
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
        holder = self.holders().get(client, "")
        if holder == self.known_as(node):
            return ""
        has_gone = self.numbers_change and holder not in map(self.known_as, online)
        return "" if has_gone else holder


def _read_names(file: Path) -> dict[str, str]:
    """Who had which name, from the file of a run."""
    try:
        return {str(client): str(node) for client, node in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}). Put back a copy of it.") from error


class NodeAway(BadMessage):
    """The SuperLink says that a node missed its heartbeats: it may be there again in a moment."""


@dataclass
class Roster:
    """Clients by node, and what they said of themselves."""

    transport: Transport
    timeout: float = 300.0  # seconds a node may take to describe itself
    patience: float = 120.0  # seconds to wait for a node that has gone
    own_model: bool = False  # whether the run trains the data's own model, on which nodes must agree then
    names: ClientNames = field(default_factory=ClientNames)
    nodes: dict[str, int] = field(default_factory=dict)
    described: dict[str, Description] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def gather(self, least: int, limit: float, wanted: Collection[str] = ()) -> list[Description]:
        """Wait until enough nodes are there, for ``limit`` seconds at most, and let every connected one describe itself.

        Where a run goes on, its clients (``wanted``) are waited for as well, and no others take part.
        """
        found, problems = self._await(least, limit, wanted)
        found, odd = those_that_fit(found, self.own_model) if found else (found, {})
        problems |= odd
        self.refused |= set(odd)
        for node, problem in problems.items():
            log.warning("Node %s cannot take part: %s", self.names.known_as(node), problem)
        if len(found) < least:
            raise DataError(f"{len(found)} of {least} nodes can take part. {' '.join(problems.values())}")
        for node, described in found.items():
            if wanted and described.client not in wanted:
                self.refused.add(node)
                mark = self.names.known_as(node)
                log.warning("Node %s is not let in: %s is no client of the run that goes on.", mark, described.client)
        chosen = {node: described for node, described in found.items() if node not in self.refused}
        mine = own_versions()["torch"]
        if other := [f"{node.client} ({node.torch or 'unknown'})" for node in chosen.values() if node.torch != mine]:
            log.warning("torch here is %s, but another one at %s: weights will differ in the last bits.", mine, ", ".join(other))
        self.nodes = {described.client: node for node, described in chosen.items()}
        self.described = {described.client: described for described in chosen.values()}
        self.names.take(self.nodes)
        return list(chosen.values())

    def _await(self, least: int, limit: float, wanted: Collection[str]) -> tuple[dict[int, Description], dict[int, str]]:
        """What the connected nodes say of themselves, once enough of them are there, and why others do not."""
        end = time.monotonic() + limit
        known: dict[int, Description] = {}
        problems: dict[int, str] = {}
        while True:
            online = sorted(self.transport.grid.get_node_ids())
            strangers = [node for node in online if node not in known and node not in problems]
            away: dict[int, str] = {}
            if strangers and len(online) >= least:
                met, failed, away = self.describe(strangers)
                known, problems = known | met, problems | failed
            found = {node: known[node] for node in online if node in known}
            misnamed = self.names.problems({node: described.client for node, described in found.items()}, online)
            found = {node: described for node, described in found.items() if node not in misnamed}
            absent = sorted(set(wanted) - {described.client for described in found.values()})
            over = time.monotonic() > end
            if len(online) >= least and not absent and (over or not away or len(found) >= least):
                self.refused |= set(misnamed)
                return found, problems | misnamed | away
            if over:
                if len(online) < least:
                    raise DataError(
                        f"{len(online)} of {least} nodes were connected after {limit:g} seconds. Start the others, wait longer "
                        f"(--run-config 'wait=600') or ask for fewer (--run-config 'min-nodes={max(1, len(online))}')."
                    )
                raise DataError(
                    f"{len(absent)} of {len(wanted)} clients of the run that is to go on were not there after {limit:g} seconds: "
                    f"{', '.join(absent)}. {' '.join({**problems, **misnamed, **away}.values())} Start their nodes, wait longer (--run-config 'wait=600'), "
                    "or begin a new run with another out."
                )
            time.sleep(LOOK_AGAIN)

    def describe(self, nodes: Sequence[int]) -> tuple[dict[int, Description], dict[int, str], dict[int, str]]:
        """Request nodes who they are; those that cannot say so come with the reason, and apart those that had gone meanwhile."""
        sent = self.transport.send(
            {node: WireMessage({"what": DESCRIBE, "versions": own_versions()}) for node in nodes}, "query", "describe", self.timeout
        )
        found: dict[int, Description] = {}
        problems: dict[int, str] = {}
        away: dict[int, str] = {}
        for node in nodes:
            try:
                answer = read_answer(self.transport.wait(sent[node]), node, self.timeout)
                if not answer.control.get("ok"):
                    raise BadMessage(reason_in(answer.control.get("problem")))
                found[node] = Description.read(answer.control.get("description"))
            except NodeAway as error:
                away[node] = str(error)
            except BadMessage as error:
                problems[node] = str(error)
        return found, problems, away

    def present(self, clients: Collection[str], insist: bool) -> dict[str, int]:
        """The nodes of those clients that are there now.

        A node that has gone is waited for, once; after that only when ``insist`` says that the round needs it.
        """
        end = time.monotonic() + self.patience
        while True:
            online = set(self.transport.grid.get_node_ids())
            self._meet(online - set(self.nodes.values()) - self.refused, online)
            self.refused &= online
            absent = {client for client in clients if self.nodes[client] not in online}
            self.given_up &= absent
            if not absent or (absent <= self.given_up and not insist):
                break
            if time.monotonic() >= end:
                self.given_up |= absent
                break
            time.sleep(LOOK_AGAIN)
        for client in sorted(absent):
            log.warning("Client %s is left out: its node is not connected.", client)
        return {client: self.nodes[client] for client in clients if client not in absent}

    def _meet(self, strangers: Collection[int], online: Collection[int]) -> None:
        """A node that came back under another number takes its client's place; others must wait for the next run."""
        if not strangers:
            return
        found, problems, _ = self.describe(sorted(strangers))
        known = {node: described for node, described in found.items() if self.described.get(described.client) == described}
        for node in found.keys() - known.keys():
            problems[node] = f"{found[node].client} is no client of this run, or its data have changed"
        problems |= self.names.problems({node: described.client for node, described in known.items()}, online)
        for node, described in known.items():
            # Who had the name first may always take its place, another node while nobody is there.
            has_gone = self.nodes[described.client] not in online
            is_first = self.names.holders().get(described.client) == self.names.known_as(node)
            if node not in problems and (has_gone or is_first):
                log.info("Client %s is back.", described.client)
                self.nodes[described.client] = node
            else:
                problems.setdefault(node, f"{described.client} is there already")
        for node, why in problems.items():
            self.refused.add(node)
            log.warning("Node %s is not let in: %s", self.names.known_as(node), why)


def read_answer(message: Message | None, node: int, timeout: float) -> WireMessage:
    """The wire message in an answer of this node; an error says why there is none."""
    if message is None:
        raise BadMessage(f"it gave no answer within {timeout:g} seconds")
    if message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE:
        raise NodeAway(f"it was not connected when it was asked: {reason_in(message.error.reason)}")
    if message.has_error():
        return refusal(f"it answered with an error ({message.error.code}): {reason_in(message.error.reason)}")
    if message.metadata.src_node_id != node:
        raise BadMessage("the answer came from another node")
    return wire_message_of(message.content)


def reason_in(words: object) -> str:
    """A reason that a node gives, for the log: short, and without control characters."""
    return plain_text(str(words)[:LONGEST_REASON])
