"""Everything that leaves a client is judged, and nothing is covered by accident."""

from __future__ import annotations

from helpers.tiny_runs import built
from polyfed.core.method import methods, parse
from polyfed.core.privacy import Departure, departures, uncovered
from polyfed.settings import Settings


def rows(text: str) -> dict[str, Departure]:
    return {row.what: row for row in departures(parse(text), Settings())}


def test_without_noise_nothing_is_covered() -> None:
    experiment = built("fedavg")
    found = departures(experiment.method, experiment.settings, experiment.bench.plan)
    assert {"entries: weight", "entries: norm_stat", "training loss", "test scores"} <= {row.what for row in found}
    assert not any(row.covered for row in found)


def test_styles_statistics_and_scores_are_not_covered_by_accident() -> None:
    for text, what in [
        ("ccst + dp_sgd", "answer: ccst_collect"),
        ("static_bn + dp_sgd", "answer: statistics"),
        ("feddg_ga + dp_sgd", "extra: feddg_ga_before"),
        ("elcfs + dp_sgd", "answer: elcfs_collect"),
    ]:
        found = rows(text)
        mine = [row for row in found.values() if row.part == text.split(" ")[0] and (row.what.startswith(what.split(":")[0]))]
        assert mine and not any(row.covered for row in mine), found


def test_what_is_made_from_noisy_values_is_covered() -> None:
    found = rows("scaffold + quantise + dp_sgd + agc")
    assert found["model entries"].covered
    assert found["extra: scaffold_change"].covered and found["extra: privacy"].covered
    assert "training loss" not in found
    assert not found["number of training samples"].covered and not found["numbers of samples by class"].covered
    assert not uncovered(parse("scaffold + quantise + dp_sgd + agc"), Settings())


def test_batch_norm_statistics_are_never_covered_for_samples() -> None:
    plan = built("fedavg").bench.plan
    found = {row.what: row for row in departures(parse("fedavg + dp_sgd"), Settings(), plan)}
    assert not found["entries: norm_stat"].covered and found["entries: weight"].covered
    assert "without noise" in found["entries: norm_stat"].why


def test_every_method_is_judged() -> None:
    for name in methods.names():
        method = parse(name)
        found = departures(method, Settings(selection="best_validation", loss="weighted_focal"))
        sent = {extra for part in method.parts for extra in part.reply_extras.get("train", {})}
        assert {f"extra: {extra}" for extra in sent} | {f"answer: {question}" for question in method.answers} <= {
            row.what for row in found
        }
        assert {"validation scores", "numbers of samples by class"} <= {row.what for row in found}
        assert all(row.why and row.when and row.granularity for row in found)
        if not method.facts.protects:
            assert not any(row.covered for row in found if row.granularity != "none")
