"""Central training: one client with all data."""

from __future__ import annotations

import functools

from helpers import tiny_runs

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_central_trains_on_the_union_and_tests_every_domain() -> None:
    experiment = trained("central")
    assert [len(client.train) for client in experiment.federation.clients] == [13 + 8 + 5]
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert {row.domain for row in rows} == {"big", "middle", "small"}
