"""What the doctor looks at: a few training images of some clients, and no test image.

A small federation is drawn from the whole one, so that looking takes as long for a thousand clients as for twenty. Its ``shuffled`` twin
has the same images dealt to clients of the same sizes at random: what is measured there comes from chance, not from clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, Examples, Federation, joined
from polyfed.core.seeds import chooser, generator
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.settings import Settings
from polyfed.studies.sweep.data import ForbiddenExamples, trial_settings, without_tests

IMAGES = 256
CLIENTS = 20


def untested(data: Any, settings: Settings) -> Federation:
    """The federation, with every test set out of reach."""
    if isinstance(data, Federation):
        return _without_tests(data)
    found = data if isinstance(data, DataSet) else build_data_set(data, settings)
    return build_federation(without_tests(found), trial_settings(settings))


def _without_tests(federation: Federation) -> Federation:
    def locked(tests: Mapping[str, Examples], whose: str) -> dict[str, Examples]:
        return {domain: ForbiddenExamples(whose or domain, len(examples)) for domain, examples in tests.items()}

    clients = tuple(dataclasses.replace(client, tests=locked(client.tests, client.id)) for client in federation.clients)
    return dataclasses.replace(federation, clients=clients, unseen=locked(federation.unseen, ""))


def drawn(federation: Federation, seed: int, images: int = IMAGES, clients: int = CLIENTS) -> Federation:
    """Some training images of some clients, in memory; nothing to validate or test on."""
    chosen = federation.clients
    if len(chosen) > clients:
        chosen = tuple(chooser(seed, "doctor", "clients").sample(chosen, clients))
    return dataclasses.replace(federation, clients=tuple(_fewer(client, seed, images) for client in chosen), unseen={})


def _fewer(client: ClientData, seed: int, images: int) -> ClientData:
    order = torch.randperm(len(client.train), generator=generator(seed, "doctor", "images", client.id))[:images]
    x, y = client.train.batch(order)
    return ClientData(client.id, client.domains, ArrayExamples(x, y), {})


def shuffled(federation: Federation, seed: int) -> Federation:
    """The same images, dealt at random to clients of the same sizes."""
    everything = joined([client.train for client in federation.clients])
    order = torch.randperm(len(everything), generator=generator(seed, "doctor", "shuffled"))
    parts = torch.split(order, [len(client.train) for client in federation.clients])
    clients = (
        dataclasses.replace(client, train=everything.subset(part)) for client, part in zip(federation.clients, parts, strict=True)
    )
    return dataclasses.replace(federation, clients=tuple(clients))
