"""What travels, message by message, for methods that send what FedAvg sends and nothing beside it; and IBN's identity."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.conversation import Ask, Reply
from polyfed.data.federation import ArrayExamples, Federation
from polyfed.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import SIZES, TinyNet, tiny_federation
from watching import messages

PLAIN = set(TinyNet().state_dict())
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AFFINE = ("weight", "bias")


def trained(method: str, federation: Federation | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    experiment = Experiment(Settings(method=method, **values), federation or tiny_federation(), model=TinyNet())
    experiment.train()
    return experiment


def under(layer: str, *names: str) -> set[str]:
    return {f"{layer}.{name}" for name in names}


def in_order(seen: list[tuple[Ask, Reply]]) -> list[tuple[int, str, str]]:
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
    assert not experiment.delivery.kept


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


def test_dson_of_domains_keeps_its_norms_out_of_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained("dson(domain_specific=True)")
    own = {name for layer in ("stem.1", "branch.1") for name in under(layer, *AFFINE, *STATISTICS, "score")}
    for ask, reply in seen:
        assert set(ask.payloads[reply.client].entries) == set(reply.entries) == PLAIN - own
        assert not ask.payloads[reply.client].extras and not reply.extras
    assert [set(experiment.delivery.kept[client].entries) for client in SIZES] == [own] * 3


def alike() -> Federation:
    """Every client has one image, many times, under several labels."""
    federation = tiny_federation()

    def repeated(x: Tensor) -> Tensor:
        return x[:1].expand_as(x).clone()

    clients = [
        dataclasses.replace(client, train=ArrayExamples(repeated(client.train.batch(slice(None))[0]), client.train.labels))
        for client in federation.clients
    ]
    return dataclasses.replace(federation, clients=tuple(clients))


def test_ibn_is_its_parent_where_every_image_of_a_batch_is_the_same() -> None:
    """Then the statistics of an image are those of its batch, and half the channels lose nothing by being normalised alone."""
    ours, plain = trained("ibn", alike()).server.state, trained("fedavg", alike()).server.state
    halves = {name: torch.cat([ours[f"stem.1.{half}_half.{name}"] for half in ("instance", "batch")]) for name in AFFINE}
    for name in AFFINE:
        torch.testing.assert_close(halves[name], plain[f"stem.1.{name}"], rtol=0, atol=1e-5)
    for name in STATISTICS:
        whole = plain[f"stem.1.{name}"]
        torch.testing.assert_close(ours[f"stem.1.batch_half.{name}"], whole[4:] if whole.dim() else whole, rtol=1e-5, atol=1e-5)
    for name in PLAIN - under("stem.1", *AFFINE, *STATISTICS):
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-5)
    apart = trained("ibn").server.state["head.weight"] - trained("fedavg").server.state["head.weight"]
    assert float(apart.abs().max()) > 1e-3
