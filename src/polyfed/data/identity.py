"""How a run recognises its data: what it records of them, and in what other data differ when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from polyfed.core.data_types import Federation
from polyfed.data.recorded_inputs import RecordedInputs, shape_words

LISTED_CLIENTS = 100
"""Up to this number of clients, the samples of each are recorded; of more only their digest."""
NAMED_DIFFERENCES = 3
COUNTED = {"clients": "clients", "training_samples": "training samples", "classes": "classes"}


def identity_of(federation: Federation) -> dict[str, Any]:
    """The facts by which data are recognised, as plain values."""
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
        **RecordedInputs.of(federation).as_plain(),
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
    """In what the data of now differ from those a run was started with, in words; a new name alone is no difference."""
    changed = {key for key in then if key != "name" and then[key] != now.get(key)}
    found = _between_clients(then["samples"], now.get("samples", {})) if "samples" in changed and "samples" in now else []
    found = found or [f"{now[key]} {words} instead of {then[key]}" for key, words in COUNTED.items() if key in changed]
    if "unseen" in changed:
        found.append(f"unseen are {', '.join(now['unseen']) or 'none'} instead of {', '.join(then['unseen']) or 'none'}")
    if "input_shape" in changed:
        found.append(f"inputs are {shape_words(now['input_shape'])} instead of {shape_words(then['input_shape'])}")
    for key in ("mean", "std"):
        if key in changed:
            found.append(f"channels are normalised by the {key} {now[key]} instead of {then[key]}")
    if not found and "source" in changed:
        found.append(f"they are {now['source']!r} instead of {then['source']!r}")
    if not found and "digest" in changed:
        found.append("the names of classes, or the sizes of validation or test parts, are others")
    return found


def _between_clients(then: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    found = [f"client {client} with {count} training samples is missing" for client, count in then.items() if client not in now]
    found += [f"client {client} is new" for client in now if client not in then]
    found += [
        f"client {client} has {now[client]} training samples instead of {count}"
        for client, count in then.items()
        if client in now and now[client] != count
    ]
    more = len(found) - NAMED_DIFFERENCES
    return found[:NAMED_DIFFERENCES] + ([f"and {more} more differences"] if more > 0 else [])
