"""The roster: which node is which client. Nodes describe themselves; what they say must fit together."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from polyfed.errors import DataError
from polyfed.flower.parcel import DESCRIBE, BadParcel, Parcel, refusal
from polyfed.flower.post import Post
from polyfed.flower.records import parcel_of
from polyfed.outline import INPUT_TYPES

log = logging.getLogger("polyfed")

LOOK_AGAIN = 1.0
LONGEST_REASON = 500


@dataclass(frozen=True)
class Description:
    """What a node says of itself: names and numbers, no examples."""

    client: str
    domains: tuple[str, ...]
    name: str
    source: str
    default_model: str
    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    input_shape: tuple[int, ...]
    input_type: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tests: Mapping[str, int]
    validation: int | None

    @classmethod
    def read(cls, told: object) -> Description:
        """A description as it came over the wire."""
        if not isinstance(told, dict):
            raise BadParcel("it does not describe itself")
        try:
            return cls(
                client=str(told["client"]),
                domains=tuple(str(name) for name in told["domains"]),
                name=str(told["name"]),
                source=str(told["source"]),
                default_model=str(told["default_model"]),
                classes=tuple(str(name) for name in told["classes"]),
                class_counts=tuple(_count(number) for number in told["class_counts"]),
                input_shape=tuple(_count(side) for side in told["input_shape"]),
                input_type=_known_type(told["input_type"]),
                mean=tuple(_finite(number) for number in told["mean"]),
                std=tuple(_finite(number) for number in told["std"]),
                tests={str(domain): _count(number) for domain, number in told["tests"].items()},
                validation=None if told["validation"] is None else _count(told["validation"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadParcel(f"its description lacks something ({type(error).__name__}: {error})") from error


def _count(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _finite(number: object) -> float:
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(f"{number!r} is no number")
    return float(number)


def _known_type(name: object) -> str:
    if name not in INPUT_TYPES:
        raise ValueError(f"{name!r} is no type of inputs")
    return str(name)


@dataclass
class Roster:
    """Clients by node, and what they said of themselves.

    Args:
        post: how nodes are reached.
        timeout: seconds a node may take to describe itself.
        patience: seconds to wait for a node that has gone.
    """

    post: Post
    timeout: float = 300.0
    patience: float = 120.0
    nodes: dict[str, int] = field(default_factory=dict)
    described: dict[str, Description] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def gather(self, least: int, limit: float, wanted: Collection[str] = ()) -> list[Description]:
        """Wait until so many nodes are there, and let every connected one describe itself.

        Args:
            least: how many.
            limit: seconds to wait.
            wanted: clients that are waited for as well, where a run goes on; then no others take part.
        """
        found, problems = self._await(least, limit, wanted)
        for node, problem in problems.items():
            log.warning("Node %d cannot take part: %s", node, problem)
        if len(found) < least:
            raise DataError(f"{len(found)} of {least} nodes can take part. {' '.join(problems.values())}")
        for node, told in found.items():
            if wanted and told.client not in wanted:
                self.refused.add(node)
                log.warning("Node %d is not let in: %s is no client of the run that goes on.", node, told.client)
        chosen = {node: told for node, told in found.items() if node not in self.refused}
        check_together(list(chosen.values()))
        self.nodes = {told.client: node for node, told in chosen.items()}
        self.described = {told.client: told for told in chosen.values()}
        return list(chosen.values())

    def _await(self, least: int, limit: float, wanted: Collection[str]) -> tuple[dict[int, Description], dict[int, str]]:
        """What the connected nodes say of themselves, once enough of them are there, and why others do not."""
        end = time.monotonic() + limit
        known: dict[int, Description] = {}
        problems: dict[int, str] = {}
        while True:
            online = sorted(self.post.grid.get_node_ids())
            strangers = [node for node in online if node not in known and node not in problems]
            if strangers and len(online) >= least:
                met, failed = self.describe(strangers)
                known, problems = known | met, problems | failed
            found = {node: known[node] for node in online if node in known}
            absent = sorted(set(wanted) - {told.client for told in found.values()})
            if len(online) >= least and not absent:
                return found, problems
            if time.monotonic() > end:
                if len(online) < least:
                    raise DataError(
                        f"{len(online)} of {least} nodes were connected after {limit:g} seconds. Start the others, wait longer "
                        f"(--run-config 'wait=600') or ask for fewer (--run-config 'min-nodes={max(1, len(online))}')."
                    )
                raise DataError(
                    f"{len(absent)} of {len(wanted)} clients of the run that is to go on were not there after {limit:g} seconds: "
                    f"{', '.join(absent)}. {' '.join(problems.values())} Start their nodes, wait longer (--run-config 'wait=600'), "
                    "or begin a new run with another out."
                )
            time.sleep(LOOK_AGAIN)

    def describe(self, nodes: Sequence[int]) -> tuple[dict[int, Description], dict[int, str]]:
        """Ask nodes who they are; those that cannot say so come with the reason."""
        sent = self.post.send({node: Parcel({"what": DESCRIBE}) for node in nodes}, "query", "describe", self.timeout)
        found: dict[int, Description] = {}
        problems: dict[int, str] = {}
        for node in nodes:
            try:
                told = opened(self.post.wait(sent[node]), node, self.timeout)
                if not told.control.get("ok"):
                    raise BadParcel(str(told.control.get("problem"))[:LONGEST_REASON])
                found[node] = Description.read(told.control.get("description"))
            except BadParcel as error:
                problems[node] = str(error)
        return found, problems

    def present(self, clients: Collection[str], insist: bool) -> dict[str, int]:
        """The nodes of those clients that are there now.

        A node that has gone is waited for, once; after that only when ``insist`` says that the round needs it.
        """
        end = time.monotonic() + self.patience
        while True:
            online = set(self.post.grid.get_node_ids())
            self._meet(online - set(self.nodes.values()) - self.refused)
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

    def _meet(self, strangers: Collection[int]) -> None:
        """A node that came back under another number takes its client's place; others must wait for the next run."""
        if not strangers:
            return
        found, problems = self.describe(sorted(strangers))
        for node in strangers:
            told = found.get(node)
            if told is not None and self.described.get(told.client) == told:
                log.info("Client %s is back.", told.client)
                self.nodes[told.client] = node
            else:
                self.refused.add(node)
                why = problems.get(node, f"{told.client} is no client of this run, or its data have changed" if told else "")
                log.warning("Node %d is not let in: %s", node, why)


def opened(message: Message | None, node: int, timeout: float) -> Parcel:
    """The parcel in an answer of this node; anything else is said why."""
    if message is None:
        raise BadParcel(f"it gave no answer within {timeout:g} seconds")
    if message.has_error():
        return refusal(f"it answered with an error ({message.error.code}): {str(message.error.reason)[:LONGEST_REASON]}")
    if message.metadata.src_node_id != node:
        raise BadParcel("the answer came from another node")
    return parcel_of(message.content)


def check_together(told: Sequence[Description]) -> None:
    """Refuse nodes that cannot train one model."""
    first = told[0]
    names = [one.client for one in told]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"Two nodes call themselves {', '.join(twice)}. Give each a name of its own: --node-config 'client=\"NAME\"'."
        )
    for other in told[1:]:
        if other.classes != first.classes:
            raise DataError(
                f"{first.client} has the classes {_few(first.classes)}, {other.client} has {_few(other.classes)}. "
                "All nodes need the same classes in the same order."
            )
        if other.input_shape != first.input_shape:
            raise DataError(
                f"Inputs of {first.client} have the shape {first.input_shape}, those of {other.client} {other.input_shape}. "
                "All nodes need the same."
            )
        if (other.input_type, other.mean, other.std) != (first.input_type, first.mean, first.std):
            raise DataError(
                f"{first.client} scales its inputs by mean {first.mean} and deviation {first.std} ({first.input_type}), {other.client} "
                f"by {other.mean} and {other.std} ({other.input_type}). All nodes need the same normalisation."
            )


def _few(names: Sequence[str]) -> str:
    shown: list[Any] = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"{', '.join(shown)} ({len(names)})"
