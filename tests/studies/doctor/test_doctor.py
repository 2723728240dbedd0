"""Check that the doctor recognises differences between clients, names outliers, explains its advice, and reads no test image."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import polyfed as package
from helpers.command_line import Command
from helpers.handwriting import federation, handwriting
from helpers.scenes import squares
from polyfed.core.method import parse
from polyfed.settings import Settings
from polyfed.studies.doctor.examine import Diagnosis
from polyfed.studies.doctor.findings import FINE, KNOWN, Finding, advise, findings
from polyfed.studies.doctor.measures import (
    Measures,
    class_distance,
    draw,
    label_skew,
    shuffle,
    shuffle_in_classes,
    smallest_batch,
)

MODEL = "small_cnn(width=8)"


@functools.cache
def diagnosis(inverted: int | None) -> Diagnosis:
    return package.doctor(federation(inverted), MODEL)


def test_batch_norm_is_fine_for_identical_clients() -> None:
    found = diagnosis(None)
    assert found.advice.verdict == FINE == "batch norm is fine" and found.advice.method == "fedavg" and found.outliers == []
    assert not any(one.is_large for one in found.findings)


def test_the_client_with_inverted_colours_is_an_outlier() -> None:
    found = diagnosis(2)
    assert found.outliers == ["c2"] and found.advice.verdict != FINE
    assert "The batch-norm statistics of c2 differ" in found.finding("statistics").sentence
    assert found.finding("gradient bias").value > 3 and found.finding("domains").is_large
    details = found.finding("gradient bias").details
    assert details["batch norm"] > details["by chance"] > max(details[n] for n in ("group norm", "frozen statistics", "no norm"))


def test_tasks_without_class_labels_skip_some_findings() -> None:
    found = package.doctor(squares(), batch_size=8)
    names = [one.name for one in found.findings]
    assert names == ["statistics", "gradient bias", "smallest batch", "sampling", "model"]
    assert found.left_out == dict.fromkeys(("label skew", "domains"), "the task has no class labels")
    assert found.finding("statistics").is_large and found.advice.method == "fedbn"


def test_every_finding_has_a_number_a_range_and_a_sentence() -> None:
    told = diagnosis(2).as_json()
    names = ["statistics", "gradient bias", "label skew", "domains", "smallest batch", "sampling", "model"]
    assert [one["name"] for one in told["findings"]] == names
    for one in told["findings"]:
        assert isinstance(one["value"], float | int) and one["sentence"].endswith(".")
    assert all(len(one["known"]) > 5 for one in told["findings"])
    assert told["cost"]["cpu_seconds"] > 0 and told["command"].startswith("polyfed sweep") and told["seconds"] > 0
    assert told["method"] in repr(diagnosis(2)) and told["command"] in repr(diagnosis(2))


def test_no_test_image_of_a_data_set_is_read() -> None:
    data = handwriting()
    few = replace(data, domains=tuple(replace(d, train=d.train.subset(torch.arange(20))) for d in data.domains))
    told: list[str] = []
    found = package.doctor(few, "small_cnn(width=4)", unseen=("street",), batch_size=8, notify=told.append)
    assert told[0] == "Training a few steps at each client" and "Comparing gradients with batch norm" in told
    assert found.measures.clients == 4  # reading a test set would have raised an error


def made(**changes: Any) -> Measures:
    values: dict[str, Any] = {"clients": 4, "looked_at": 4, "images": {}, "sampled": 4, "batch_size": 32, "smallest_batch": 20}
    values |= {"label_skew": 0.1, "batch_norms": 3, "parameters": 10, "entries": 40, "domains": 1.0, "domains_by_chance": 1.0}
    values |= {"shift": dict.fromkeys("abcd", 0.1), "shift_by_chance": 0.1, "bias": 0.2, "bias_by_chance": 0.2}
    return Measures(**{**values, "other_bias": {"group norm": 0.0}, **changes})


DIFFERENT = {"domains": 2.0, "shift": dict.fromkeys("abcd", 0.3), "bias": 0.5}


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, "fedavg"),
        (DIFFERENT, "fedbn"),
        ({**DIFFERENT, "clients": 100, "sampled": 10}, "fedwon"),
        ({"batch_size": 2, "smallest_batch": 2}, "fedwon"),
        ({"label_skew": 0.7, "bias": 0.5}, "fixbn"),
        ({"label_skew": 0.7, "bias": 0.5, "domains": float("nan")}, "fixbn"),
        ({"label_skew": 0.7}, "fedavg"),
        ({**DIFFERENT, "label_skew": 0.7}, "fedbn"),
        ({**DIFFERENT, "domains": float("nan")}, "fedbn"),
        ({"batch_norms": 0, "label_skew": 0.7}, "fedavg"),
    ],
)
def test_advice_follows_from_findings(changes: dict[str, Any], method: str) -> None:
    found = {one.name: one for one in findings(made(**changes))}
    advice = advise(found)
    assert advice.method == method != advice.runner_up and advice.reasons
    assert parse(advice.method) and parse(advice.runner_up)


def test_the_runner_up_needs_class_labels_only_if_the_task_has_them() -> None:
    def runner_up(**changes: Any) -> str:
        return advise({one.name: one for one in findings(made(**{**DIFFERENT, **changes}))}).runner_up

    assert (runner_up(), runner_up(label_skew=float("nan"), domains=float("nan"))) == ("gperxan", "perxan")
    objectives = {name: parse(name).objective for name in ("gperxan", "perxan")}
    assert objectives["gperxan"] and not objectives["perxan"]  # the guide


def test_one_client_far_away_does_not_make_the_others_stand_out() -> None:
    shift = {"a": 0.1, "b": 0.12, "c": 0.9, "d": 0.11}
    (found,) = [one for one in findings(made(shift=shift)) if one.name == "statistics"]
    assert isinstance(found, Finding) and found.details["outliers"] == ["c"]


def test_known_federations_lie_on_the_right_side_of_the_limits() -> None:
    fine = [name for name in KNOWN if "iid" in name or "identical" in name]
    for name, numbers in KNOWN.items():
        values = {"shift": dict.fromkeys("abcd", 0.1 * numbers["statistics"]), "bias": 0.2 * numbers["gradient bias"]}
        about = made(**values, label_skew=numbers["label skew"], domains=numbers.get("domains", float("nan")))
        verdict = advise({one.name: one for one in findings(about)}).verdict
        assert (verdict == FINE) == (name in fine), name


def test_label_skew_is_total_variation() -> None:
    same = [torch.tensor([0, 1]), torch.tensor([1, 0])]
    apart = [torch.tensor([0, 0]), torch.tensor([1, 1])]
    assert label_skew(same, 2) == 0.0 and label_skew(apart, 2) == pytest.approx(0.5)


def test_the_smallest_batch_of_a_client() -> None:
    settings = Settings(batch_size=8)
    assert [smallest_batch(images, settings) for images in (5, 16, 19, 17)] == [5, 8, 3, 8]
    assert smallest_batch(17, Settings(batch_size=8, last_batch="keep")) == 1


def test_distance_in_feature_space_is_by_class() -> None:
    features = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
    owners = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    one_class, by_owner = torch.zeros(8, dtype=torch.int64), owners
    assert class_distance(features, one_class, owners) == pytest.approx(1 / features.var(0).sqrt().item())
    assert class_distance(features, by_owner, owners) != class_distance(features, by_owner, owners)  # NaN: no class is shared
    shuffled = shuffle_in_classes(by_owner, owners, seed=0)
    assert shuffled.tolist() == owners.tolist()  # labels stay as skewed as they are


def test_what_is_drawn_is_bounded_and_shuffling_keeps_sizes() -> None:
    few = draw(federation(None), seed=0, images=7, clients=3)
    assert [len(client.train) for client in few.clients] == [7, 7, 7] and all(not client.tests for client in few.clients)
    mixed = shuffle(few, seed=0)
    images = [torch.cat([client.train.batch(slice(None))[0] for client in one.clients]).flatten(1) for one in (few, mixed)]
    assert [len(client.train) for client in mixed.clients] == [7, 7, 7]
    assert sorted(images[0].tolist()) == sorted(images[1].tolist()) and images[0].tolist() != images[1].tolist()


def test_the_command_says_what_python_says(polyfed: Command) -> None:
    told = polyfed("doctor", "digits-mini(per_domain=30)", "--model", "small_cnn(width=4)", "--batch-size", "8", "--json")
    assert told.code == 0, told.err
    assert told.json["method"] == "fedbn" and "use fedbn" in told.out and "polyfed sweep" in told.out
    again = package.doctor("digits-mini(per_domain=30)", "small_cnn(width=4)", batch_size=8).as_json()
    assert {one["name"]: one["value"] for one in again["findings"]} == {one["name"]: one["value"] for one in told.json["findings"]}
