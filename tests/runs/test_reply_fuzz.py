"""Mutated replies over all registered methods: no crash, and nothing at the server that is not finite."""

from __future__ import annotations

import logging

import pytest

from helpers.method_texts import as_trained
from helpers.mutated_replies import fuzzed
from polyfed.core.method import methods


def survive(trials: int, seed: int) -> None:
    logging.getLogger("polyfed").setLevel(logging.ERROR)
    try:
        count = 0
        for name, trial, replay in fuzzed([as_trained(name) for name in sorted(methods.names())], trials, seed):
            assert replay.is_finite(), f"{name}, trial {trial}"
            count += 1
        assert count == trials
    finally:
        logging.getLogger("polyfed").setLevel(logging.NOTSET)


def test_300_mutated_replies() -> None:
    survive(300, seed=1)


@pytest.mark.slow
@pytest.mark.fuzz
def test_20_000_mutated_replies() -> None:
    survive(20_000, seed=2)
