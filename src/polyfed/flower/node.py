"""A node at work: its own data, the bench built from the run's settings, what it keeps on its disk, and its answers.

Knows nothing of Flower: parcels come in, parcels go out, whether by a short-lived process, a resident one or Flower's simulation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyfed.build import build_bench, build_data_set, prepared_model
from polyfed.client import Client, Kept, Workbench, answer
from polyfed.conversation import TRAINING
from polyfed.data.federation import ClientData, Examples, Federation
from polyfed.data.partition import federate
from polyfed.errors import DataError, NotFinite, PolyfedError, SettingError, StateLost, nearest
from polyfed.experiment import read_initial, threads
from polyfed.flower.codec import Encoder, payload_of
from polyfed.flower.node_state import NodeState
from polyfed.flower.parcel import DESCRIBE, BadParcel, Parcel, refusal
from polyfed.flower.places import home_of
from polyfed.losses import losses
from polyfed.method import Method, as_method, load_file
from polyfed.outline import input_type
from polyfed.server import ClientInfo, in_fixed_order
from polyfed.settings import Settings, with_changes

log = logging.getLogger("polyfed")

PARTITION = "partition-id"
LOST_STATE = "lost-state"
WHEN_LOST = ("refuse", "anew")
"""What a node does when the server goes on from a state that it no longer has."""


class Workplace:
    """What the settings stand for on this machine: method, data, and a bench. Several virtual clients of a process share one."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        for file in settings.load:
            load_file(file)
        self.settings = settings
        self.method: Method = as_method(settings.method)
        self.simulated = PARTITION in config
        self.federation = whole_federation(settings, self.method) if self.simulated else own_federation(settings, config)
        self.initial = None if settings.init is None else read_initial(settings.init)
        self.told = ""
        self.made: Workbench | None = None

    def bench(self, facts: Mapping[str, Any]) -> Workbench:
        """The bench for what the server says of the whole federation: rounds, and numbers of examples by class."""
        told = json.dumps(facts, sort_keys=True)
        if self.made is None or told != self.told:
            settings = dataclasses.replace(self.settings, rounds=int(facts["rounds"]), total_epochs=None)
            with threads(settings.threads):
                model = prepared_model(settings, self.method, self.federation, None, self.initial)
                self.made = build_bench(settings, self.method, self.federation, model)
            self.made.loss = losses.build(settings.loss, class_counts=list(facts["class_counts"]))
            self.told = told
        return self.made


class Node:
    """One client at its workplace."""

    def __init__(self, workplace: Workplace, data: ClientData, home: Path, when_lost: str = "refuse") -> None:
        self.workplace, self.data, self.home, self.when_lost = workplace, data, home, when_lost

    def answer(self, parcel: Parcel) -> Parcel:
        """Answer an ask; what goes wrong here is said in the answer."""
        try:
            if parcel.control.get("what") == DESCRIBE:
                return Parcel({"ok": True, "description": self.description()})
            return self.work(parcel)
        except NotFinite as error:
            return refusal(str(error), "not_finite")
        except PolyfedError as error:
            log.warning("%s", error)
            return refusal(str(error))
        except BadParcel as error:
            return refusal(f"Client {self.data.id} cannot read what it was asked: {error}.")

    def work(self, parcel: Parcel) -> Parcel:
        """Start from the version the ask names, answer, and write down what is kept."""
        ask = parcel.control
        if ask["client"] != self.data.id:
            raise SettingError(f"This node is client {self.data.id}, but was asked as client {ask['client']}.")
        state = NodeState(self.home, ask["run"], self.data.id)
        kept, begun_anew = self.starting_point(state, ask["start"], ask["purpose"])
        bench = self.workplace.bench(ask["facts"])
        client = Client(self.data, bench, kept, int(ask["round"]), int(ask["attempt"]))
        with threads(bench.settings.threads):
            payload = answer(client, ask["what"], payload_of(parcel))
        told: dict[str, Any] = {"ok": True, "loss": client.loss, "version": None, "begun_anew": begun_anew}
        if ask["purpose"] == TRAINING and (client.kept.entries or client.kept.memory or ask["start"] is not None):
            told |= {"version": ask["version"], "digest": state.store(ask["version"], client.kept)}
            state.tidy(ask["needed"], ask["version"])
        return Encoder().parcel(payload, told)

    def starting_point(self, state: NodeState, start: Mapping[str, str] | None, purpose: str) -> tuple[Kept, bool]:
        """What the client kept in the version it goes on from, and whether that is lost and it begins to train anew."""
        if start is None:
            return Kept(), False
        try:
            return state.load(start["version"], start["digest"]), False
        except StateLost as error:
            if self.when_lost == "anew" and purpose == TRAINING:
                log.warning("%s It begins anew.", error)
                return Kept(), True
            raise StateLost(f"{error} To let it begin anew, start its node with --node-config '{LOST_STATE}=\"anew\"'.") from error

    def description(self) -> dict[str, Any]:
        """What the server learns of this client: names and numbers, no examples."""
        federation, data = self.workplace.federation, self.data
        raw, _ = data.train.batch(slice(0, 1))
        return {
            "client": data.id,
            "domains": list(data.domains),
            "name": federation.name,
            "source": federation.source,
            "default_model": federation.default_model,
            "classes": list(federation.classes),
            "class_counts": counts_of(data.train, len(federation.classes)),
            "input_shape": list(raw.shape[1:]),
            "input_type": input_type(raw),
            "mean": list(federation.preparation.mean),
            "std": list(federation.preparation.std),
            "tests": {domain: len(examples) for domain, examples in data.tests.items()},
            "validation": None if data.validation is None else len(data.validation),
        }


def counts_of(examples: Examples, classes: int) -> list[int]:
    """Numbers of examples by class."""
    counts: list[int] = torch.bincount(examples.labels, minlength=classes).tolist()
    return counts


def whole_federation(settings: Settings, method: Method) -> Federation:
    """The federation of the settings, as the server of a simulation sees it."""
    from polyfed.build import build_federation

    federation = build_federation(settings.data, settings)
    return federation if method.population is None else method.population(federation)


def own_federation(settings: Settings, config: Mapping[str, Any]) -> Federation:
    """A federation of this node alone, from the data its own configuration names."""
    changes = {"root": str(config["root"])} if "root" in config else {}
    dataset = build_data_set(str(config.get("data", settings.data)), with_changes(settings, changes))
    # Another node may hold the domain that nobody trains on.
    unseen = [domain.name for domain in dataset.domains if domain.name in settings.unseen]
    federation = federate(dataset, settings.partition, unseen, settings.seed)
    return dataclasses.replace(federation, clients=(own_client(federation, config),), unseen={})


def own_client(federation: Federation, config: Mapping[str, Any]) -> ClientData:
    """Which part of its data set a node is: by ``client`` or ``domain`` of its configuration, or the only one there is."""
    known = {client.id: client for client in federation.clients}
    wanted = config.get("client")
    if wanted in known:
        return known[str(wanted)]
    found = list(known.values())
    if "domain" in config:
        domain = str(config["domain"])
        found = [client for client in found if client.domains == (domain,)]
        if not found:
            domains = [name for client in known.values() for name in client.domains]
            raise DataError(f"{federation.name} has no client of domain {domain!r} alone. {nearest(domain, domains)}")
    if len(found) != 1:
        raise DataError(
            f"{federation.name} holds {len(found)} clients ({', '.join(client.id for client in found)}). Say which one this node is: "
            f"--node-config 'domain=\"NAME\"' or 'client=\"NAME\"'."
        )
    return found[0] if wanted is None else dataclasses.replace(found[0], id=str(wanted))


def virtual_client(federation: Federation, number: int) -> ClientData:
    """The client of a virtual node: by its place in the fixed order."""
    by_id = {client.id: client for client in federation.clients}
    order = in_fixed_order(map(ClientInfo.of, federation.clients))
    return by_id[order[number].id]


def build_node(settings: Settings, config: Mapping[str, Any], home: Path | None = None) -> Node:
    """A node from the run's settings and its own configuration."""
    place = _workplace(json.dumps(dataclasses.asdict(settings)), json.dumps(_shared_by_clients(config), sort_keys=True))
    clients = place.federation
    data = virtual_client(clients, int(config[PARTITION])) if place.simulated else clients.clients[0]
    return Node(place, data, home or home_of(config), when_lost(config))


def when_lost(config: Mapping[str, Any]) -> str:
    """What this node does when its state is lost."""
    told = str(config.get(LOST_STATE, WHEN_LOST[0]))
    if told not in WHEN_LOST:
        raise SettingError(f"--node-config: {LOST_STATE} cannot be {told!r}. {nearest(told, WHEN_LOST)}")
    return told


def _shared_by_clients(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a workplace; virtual clients of one process share it."""
    return {PARTITION: 0} if PARTITION in config else dict(config)


@functools.lru_cache(maxsize=1)
def _workplace(settings: str, config: str) -> Workplace:
    return Workplace(read_settings(settings), json.loads(config))


def read_settings(text: str) -> Settings:
    """Settings from JSON text."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
    return with_changes(Settings(), values)
