"""Clients in this process: the same bits every time, tensors that are not copied, simulated dropouts."""

from __future__ import annotations

import functools

from helpers import tiny_runs
from polyfed.core.rounds import Payload
from polyfed.runs.result import Result
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)
digest_of = functools.partial(tiny_runs.digest_of, rounds=3)


def test_backend_and_repetition_do_not_change_bits() -> None:
    assert digest_of("fedbn") == digest_of("fedbn") == digest_of("fedbn", backend="debug")


def test_simulated_dropouts_are_repeatable_and_leave_state_alone() -> None:
    one, two = (trained("fedbn", drop=0.4, rounds=6, min_share=0.1) for _ in range(2))
    assert Result(one, []).digest == Result(two, []).digest
    assert Result(one, []).digest != digest_of("fedbn", rounds=6)


def test_memory_grows_only_by_local_entries() -> None:
    experiment = trained("silobn", tiny_federation({f"c{i}": 5 for i in range(12)}))
    local = sum(v.numel() * v.element_size() for n, v in TinyNet().state_dict().items() if "running" in n or "num_batches" in n)
    held = sum(v.numel() * v.element_size() for kept in experiment.backend.client_states.values() for v in kept.entries.values())
    assert held == 12 * local


def test_payloads_given_to_clients_are_the_servers_tensors_not_copies() -> None:
    experiment = trained("fedavg", rounds=1)
    ask = experiment.server.ask("train", experiment.server.sample())
    payloads: list[Payload] = list(ask.payloads.values())
    assert all(p.entries["head.weight"] is experiment.server.state["head.weight"] for p in payloads)
