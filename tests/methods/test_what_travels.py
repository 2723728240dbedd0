"""What travels, message by message, for methods that send what FedAvg sends and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.tiny_entries import AFFINE, PLAIN, STATISTICS, under
from helpers.tiny_runs import trained
from helpers.watching import messages
from polyfed.core.rounds import Reply, Request
from polyfed.testing import SIZES


def in_order(seen: list[tuple[Request, Reply]]) -> list[tuple[int, str, str]]:
    return [(ask.round, ask.what, reply.client) for ask, reply in seen]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("fedavg", PLAIN),
        ("fedavg + mixstyle(p=1.0)", PLAIN),
        ("fedavg + rsc", PLAIN),
        ("fedavg + guiding", PLAIN),
        ("fedgma", PLAIN),
        ("fedavgm", PLAIN),
        ("fedadam", PLAIN),
        ("fedyogi", PLAIN),
        ("fedadagrad", PLAIN),
        ("fedavg + dson", PLAIN | under("stem.1", "score") | under("branch.1", "score")),
        (
            "fedavg + ibn",
            PLAIN - under("stem.1", *AFFINE, *STATISTICS)
            | under("stem.1.instance_half", *AFFINE)
            | under("stem.1.batch_half", *AFFINE, *STATISTICS),
        ),
        (
            "fedwon",
            PLAIN - under("stem.1", *AFFINE, *STATISTICS) - under("branch.1", *AFFINE, *STATISTICS)
            | under("stem.0", "bias", "gain")
            | under("branch.0", "gain"),
        ),
    ],
)
def test_every_entry_travels_both_ways_and_nothing_else(text: str, entries: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained(text)
    assert in_order(seen) == [(number, "train", client) for number in (1, 2) for client in SIZES]
    for ask, reply in seen:
        down = ask.payloads[reply.client]
        assert set(down.entries) == set(reply.entries) == entries
        assert not down.extras and not reply.extras
        assert all((v.shape, v.dtype) == (down.entries[n].shape, down.entries[n].dtype) for n, v in reply.entries.items())
    assert not experiment.backend.client_states


@pytest.mark.parametrize("text", ["fedgma", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "median", "trimmed_mean", "krum"])
def test_what_changes_the_server_only_has_fedavgs_first_round_of_messages(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    trained("fedavg", rounds=1)
    plain = list(seen)
    seen.clear()
    trained(text, rounds=1)
    assert in_order(seen) == in_order(plain)
    for (ask, reply), (other_ask, other) in zip(seen, plain, strict=True):
        assert same(ask.payloads[reply.client].entries, other_ask.payloads[other.client].entries)
        assert same(reply.entries, other.entries) and not reply.extras and not ask.payloads[reply.client].extras


def same(some: Any, others: Any) -> bool:
    return set(some) == set(others) and all(torch.equal(value, others[name]) for name, value in some.items())
