"""Determine the handling of each entry kind from the notes of two clients: values at the start of round 2, and the server's final values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from two_clients import BATCH, ROUNDS, SAMPLES

GROUPS = {
    "weights": ("conv.weight", "head.weight", "head.bias"),
    "scale and shift": ("norm.weight", "norm.bias"),
    "running mean": ("norm.running_mean",),
    "running variance": ("norm.running_var",),
    "batches counted": ("norm.num_batches_tracked",),
}
COUNTER = "norm.num_batches_tracked"
BY_SAMPLES, EQUALLY = "mean", "unweighted mean"
LARGEST, FIRST, SECOND, START = "largest", "client 1's", "client 2's", "start value"
OWN, LEFT, ABSENT = "local", "from the previous client", "missing"
CUT = ", truncated to an integer"

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Findings:
    """By group: what clients begin a round with, what the server's model ends with; and the first channel's running mean."""

    clients: dict[str, str]
    server: dict[str, str]
    running_mean: dict[str, float]

    def as_json(self) -> dict[str, dict[str, str] | dict[str, float]]:
        return asdict(self)


def found_in(folder: Path) -> Findings:
    """Read the notes of a run."""
    begins, ends = {}, {}
    for client, samples in SAMPLES.items():
        states = read(folder / f"{client}.jsonl")
        a_round = 2 * samples // BATCH
        if len(states) != ROUNDS * a_round:
            raise ValueError(f"client {client} was to take {ROUNDS * a_round} notes, and took {len(states)}")
        begins[client] = [states[number * a_round] for number in range(ROUNDS)]
        ends[client] = [states[(number + 1) * a_round - 1] for number in range(ROUNDS)]
    (server,) = read(folder / "server.jsonl")
    start = begins[1][0]
    clients = {group: same({at_clients(name, start, begins, ends) for name in names}) for group, names in GROUPS.items()}
    at_end = {client: ends[client][-1] for client in SAMPLES}
    held = {
        group: same({at_server(name, start, at_end, server, clients[group] == LEFT) for name in names})
        for group, names in GROUPS.items()
    }
    mean = {f"client {client} ends round 1": first_channel(ends[client][0]) for client in SAMPLES}
    mean |= {f"client {client} begins round 2": first_channel(begins[client][1]) for client in SAMPLES}
    return Findings(clients, held, mean)


def read(file: Path) -> list[State]:
    return [{name: np.asarray(value) for name, value in json.loads(line).items()} for line in file.read_text().splitlines()]


def first_channel(state: State) -> float:
    return round(float(state["norm.running_mean"][0]), 4)


def same(fates: set[str]) -> str:
    return " or ".join(sorted(fates))


def means(values: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """The means a server may take."""
    total = sum(SAMPLES.values())
    weighted = sum(SAMPLES[client] / total * value for client, value in values.items())
    return {BY_SAMPLES: np.asarray(weighted), EQUALLY: np.mean(list(values.values()), axis=0)}


def at_clients(name: str, start: State, begins: Mapping[int, list[State]], ends: Mapping[int, list[State]]) -> str:
    """Describe the values with which both clients start round 2."""
    ended = {client: states[0][name] for client, states in ends.items()}
    for_both = {**means(ended), FIRST: ended[1], SECOND: ended[2], START: start[name]}
    if name == COUNTER:
        del for_both[SECOND]
        for_both[LARGEST] = np.max(list(ended.values()), axis=0)
    possible = {fate: {1: value, 2: value} for fate, value in for_both.items()}
    possible[OWN] = ended
    possible[LEFT] = {1: ends[2][0][name], 2: ends[1][1][name]}
    began = {client: states[1][name] for client, states in begins.items()}
    return the_one({fate: [(began[client], value[client]) for client in SAMPLES] for fate, value in possible.items()}, name)


def at_server(name: str, start: State, ended: Mapping[int, State], server: State, left: bool) -> str:
    """Describe the server's final values; ``left`` means that clients keep the entry in one model, so that the maximum is not used."""
    if name not in server:
        return ABSENT
    values = {client: state[name] for client, state in ended.items()}
    possible = {**means(values), FIRST: values[1], SECOND: values[2], START: start[name]}
    if name == COUNTER and not left:
        del possible[SECOND]
        possible[LARGEST] = np.max(list(values.values()), axis=0)
    return the_one({fate: [(server[name], value)] for fate, value in possible.items()}, name)


def the_one(possible: Mapping[str, list[tuple[np.ndarray, np.ndarray]]], name: str) -> str:
    """The only explanation that fits."""
    fitting = [fate for fate, pairs in possible.items() if all(np.allclose(found, value, atol=1e-6) for found, value in pairs)]
    if not fitting and name == COUNTER:
        fitting = [fate + CUT for fate, pairs in possible.items() if all(found == np.trunc(value) for found, value in pairs)]
    if len(fitting) != 1:
        raise ValueError(f"{name}: one of {', '.join(possible)} should explain what was noted, and {fitting or 'none'} does")
    return fitting[0]
