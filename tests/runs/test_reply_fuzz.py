"""Mutated replies for all registered methods: no crash, and only finite server state."""

from __future__ import annotations

import logging

import pytest

from helpers.method_texts import as_trained
from helpers.mutated_replies import fuzzed, replay_of
from polyfed.core.method import methods
from polyfed.runs.replay import bad_replies, with_one_replaced


@pytest.fixture(autouse=True)
def without_warnings_of_bad_replies() -> None:
    logging.getLogger("polyfed").setLevel(logging.ERROR)


def survive(trials: int, seed: int) -> None:
    count = 0
    for name, trial, replay in fuzzed([as_trained(name) for name in sorted(methods.names())], trials, seed):
        assert replay.is_finite(), f"{name}, trial {trial}"
        count += 1
    assert count == trials


def test_mutated_replies_two_for_each_method() -> None:
    survive(2 * len(methods.names()), seed=1)


@pytest.mark.slow
@pytest.mark.fuzz
def test_20_000_mutated_replies() -> None:
    survive(20_000, seed=2)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("name", methods.names())
def test_every_bad_value_of_every_extra(name: str) -> None:
    """``check_method`` sends only values that match the declared forms."""
    replay = replay_of(as_trained(name))
    extras = {
        (ask.what, extra): bad_replies(reply, extra)
        for ask, replies in reversed(replay.seen)
        if ask.what not in ("evaluate", "entries")
        for reply in replies[:1]
        for extra in reply.extras
    }
    for (question, extra), bad in extras.items():
        for what, reply in bad.items():
            replay.run(with_one_replaced(question, reply))
            assert replay.is_finite(), f"{extra} of {question} is {what}"
