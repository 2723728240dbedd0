"""What a run writes down of its data, and how other data are noticed when it is to go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from polyfed.data.federation import Federation

LISTED_CLIENTS = 100
"""Of so many clients each is written down; of more only their digest."""
TOLD_DIFFERENCES = 3
COUNTED = {"clients": "clients", "training_samples": "training samples", "classes": "classes"}


def identity_of(federation: Federation) -> dict[str, Any]:
    """The facts by which data are known again, as plain values."""
    samples = {client.id: len(client.train) for client in sorted(federation.clients, key=lambda client: client.id)}
    return {
        "name": federation.name,
        "source": federation.source,
        "classes": len(federation.classes),
        "clients": len(samples),
        "training_samples": sum(samples.values()),
        "unseen": sorted(federation.unseen),
        "test_sizes": federation.test_sizes(),
        "digest": _digest(federation),
        **({"samples": samples} if len(samples) <= LISTED_CLIENTS else {}),
    }


def _digest(federation: Federation) -> str:
    """A hash of the names of clients and classes, and of how many examples everybody has for what."""
    clients = {
        client.id: [
            len(client.train),
            None if client.validation is None else len(client.validation),
            {domain: len(examples) for domain, examples in client.tests.items()},
        ]
        for client in federation.clients
    }
    unseen = {domain: len(examples) for domain, examples in federation.unseen.items()}
    return hashlib.sha256(json.dumps([federation.classes, clients, unseen], sort_keys=True).encode()).hexdigest()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the data of now differ from those a run was begun with, in words; a new name alone is no difference."""
    changed = {key for key in then if key != "name" and then[key] != now.get(key)}
    told = _between_clients(then["samples"], now.get("samples", {})) if "samples" in changed and "samples" in now else []
    told = told or [f"{now[key]} {words} instead of {then[key]}" for key, words in COUNTED.items() if key in changed]
    if "unseen" in changed:
        told.append(f"unseen are {', '.join(now['unseen']) or 'none'} instead of {', '.join(then['unseen']) or 'none'}")
    if not told and "source" in changed:
        told.append(f"they are {now['source']!r} instead of {then['source']!r}")
    if not told and "digest" in changed:
        told.append("the names of classes, or the sizes of validation or test parts, are others")
    return told


def _between_clients(then: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    told = [f"client {client} with {count} training samples is missing" for client, count in then.items() if client not in now]
    told += [f"client {client} is new" for client in now if client not in then]
    told += [
        f"client {client} has {now[client]} training samples instead of {count}"
        for client, count in then.items()
        if client in now and now[client] != count
    ]
    more = len(told) - TOLD_DIFFERENCES
    return told[:TOLD_DIFFERENCES] + ([f"and {more} more differences"] if more > 0 else [])
