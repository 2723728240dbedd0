"""Fused clients: stacked training computes the same values as ordinary training, and reports why clients cannot be stacked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.random_images import federation, largest_difference
from polyfed.backends.fused import Fused, evenly
from polyfed.core.client import Client, Step
from polyfed.core.data_types import Federation
from polyfed.core.method import Method
from polyfed.core.part import Part
from polyfed.errors import Declined, NotFinite, SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings


def trained(backend: str, method: str | Method, data: Federation | None = None, **changes: Any) -> Experiment:
    values = {"rounds": 1, "batch_size": 4, "lr": 0.05, "model": "small_cnn(width=8)", "backend": backend} | changes
    experiment = Experiment(Settings(**values), data or federation(), method)
    experiment.train()
    return experiment


def calls_of_stack(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of every stack, except those of trials."""
    sizes: list[int] = []
    original = Fused.train

    def noting(self: Fused, stack: Any) -> Any:
        sizes.append(len(stack.trainees))
        return original(self, stack)

    monkeypatch.setattr(Fused, "train", noting)
    return sizes


SAME = [
    *("fedavg", "fedprox(mu=0.1)", "fedbn", "silobn", "fedwon", "fixbn", "scaffold", "fedstein", "gperxan", "guiding", "copa"),
    *(
        "fednova",
        "feddg_ga",
        "ccst",
        "median",
        "partialfed_fix",
        "partialfed_adaptive",
        "fedavg + group_norm",
        "layer_norm + fedavg",
    ),
    *("fedbn + agc(clip=0.05)", "fedwon + agc(clip=0.05)", 'fixbn(freeze_at=0, freeze="both")', "fixbn(freeze_at=0)"),
    'momentum(keep="local")',
]
TOLERANCE = 1e-5


@pytest.mark.parametrize("method", SAME)
def test_one_round_is_that_of_the_ordinary_way(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = calls_of_stack(monkeypatch)
    changes: dict[str, Any] = {"momentum": 0.9} if "momentum" in method else {}
    ordinary, fused = trained("process", method, **changes), trained("fused", method, **changes)
    assert sizes == [3, 2]
    assert largest_difference(fused, ordinary) < TOLERANCE
    assert fused.backend.losses_of_round == pytest.approx(ordinary.backend.losses_of_round, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedbn", {"optimizer": "adam", "lr": 0.001}),
        ("fedavg", {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.1}),
        ("fedavg", {"momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine"}),
        ('momentum(keep="local")', {"optimizer": "adam", "lr": 0.001, "rounds": 2}),
        ('momentum(keep="global")', {"momentum": 0.5, "rounds": 2}),
        ("fedbn", {"rounds": 2}),
        ("scaffold", {"rounds": 2}),
        ("copa", {"rounds": 2}),
        ("fixbn", {"rounds": 3}),
        ("fedavg", {"local_epochs": 2}),
        ("fedavg", {"last_batch": "drop", "batch_size": 10}),
        ("fedavg + quantise", {}),
        ("fedavg", {"loss": "weighted_focal"}),
    ],
)
def test_other_settings_and_later_rounds(method: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = calls_of_stack(monkeypatch)
    ordinary, fused = trained("process", method, **changes), trained("fused", method, **changes)
    assert sizes == [3, 2] * changes.get("rounds", 1)
    # Uploads rounded to eight bits jump by a 255th of their range.
    assert largest_difference(fused, ordinary) < (1e-2 if "quantise" in method else 1e-4)


def test_local_steps_stack_clients_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = calls_of_stack(monkeypatch)
    ordinary, fused = trained("process", "fedavg", local_steps=2), trained("fused", "fedavg", local_steps=2)
    assert sizes == [5]
    assert largest_difference(fused, ordinary) < TOLERANCE


def test_random_augmentation_is_drawn_in_each_clients_own_stream() -> None:
    def flip(x: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)

    data = federation(augment=flip)
    assert largest_difference(trained("fused", "fedavg", data), trained("process", "fedavg", data)) < TOLERANCE
    assert largest_difference(trained("fused", "fedavg", data), trained("process", "fedavg")) > 1e-3


def test_outside_random_numbers_are_left_alone_and_runs_repeat_to_the_bit() -> None:
    before = torch.get_rng_state()
    first, second = trained("fused", "fedavg"), trained("fused", "fedavg")
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, second.server.state[name]) for name, value in first.server.state.items())


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedavg", {"layout": "channels_last"}, "--layout channels_last works only if clients train one by one"),
        ("fedavg", {"model": "six_layer_cnn"}, r"body\.dropout4 is a dropout layer"),
        ("elcfs", {}, "elcfs cannot train stacked clients in its objective"),
        ("fedavg + mixstyle", {}, "random"),
        ("fedsr", {}, "random"),
    ],
)
def test_clients_that_cannot_be_stacked_are_an_error(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"{message}.*--backend process"):
        trained("fused", method, **changes)


def reading_the_id(step: Step) -> Tensor:
    return step.task_loss * len(step.client.id)


def asking_python(step: Step) -> Tensor:
    return step.task_loss if float(step.task_loss.detach()) > 0 else step.task_loss * 2


def counting_in_memory(step: Step) -> Tensor:
    step.client.memory["seen"] = step.client.memory.get("seen", 0) + 1
    return step.task_loss


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (reading_the_id, r"reads client\.id"),
        (asking_python, r"own cannot .* objective.*item"),
        (counting_in_memory, "other|memory"),
    ],
)
def test_a_users_term_that_needs_one_client_at_a_time_is_named(term: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        trained("fused", Method("own", objective=(term,)))


class Spoilt(nn.Module):
    """A model that returns NaN for the images of the last client, which are the brightest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 16 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits / (x.amax() < 0.85)


@pytest.mark.parametrize("backend", ["process", "fused"])
def test_a_client_whose_loss_is_not_finite_is_dropped_alone(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(rounds=1, batch_size=4, backend=backend, on_nan="drop", min_share=0.0)
    experiment = Experiment(settings, federation((8, 8, 8, 8, 8)), "fedavg", Spoilt())
    experiment.train()
    assert sorted(experiment.backend.losses_of_round) == ["c0", "c1", "c2", "c3"]
    assert "client c4 is dropped" in caplog.text
    stopping = Experiment(dataclasses.replace(settings, on_nan="stop"), federation((8, 8, 8, 8, 8)), "fedavg", Spoilt())
    with pytest.raises(NotFinite, match="at client c4"):
        stopping.train()


def test_groups_are_even_and_keep_the_order() -> None:
    assert [list(group) for group in evenly("abcdefg", 3)] == [list("abc"), list("de"), list("fg")]
    assert [list(group) for group in evenly("ab", 5)] == [list("ab")]


def test_auto_picks_by_a_measurement_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="polyfed")
    ordinary, auto = trained("process", "fedbn", rounds=2), trained("auto", "fedbn", rounds=2)
    messages = [record.getMessage() for record in caplog.records if "Backend auto" in record.getMessage()]
    assert len(messages) == 1
    assert "ms alone" in messages[0] and "ms stacked" in messages[0]
    assert largest_difference(auto, ordinary) < 1e-4


@pytest.mark.parametrize(("method", "model"), [("elcfs", "small_cnn(width=8)"), ("fedavg", "six_layer_cnn")])
def test_auto_goes_the_ordinary_way_where_clients_cannot_be_stacked(
    method: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="polyfed")
    data = federation((4, 4))
    ordinary, auto = trained("process", method, data, model=model), trained("auto", method, data, model=model)
    assert "training clients one by one" in caplog.text
    assert all(torch.equal(value, auto.server.state[name]) for name, value in ordinary.server.state.items())


class RefuseOnce(Part):
    reads_data = False

    def __call__(self, client: Client) -> None:
        if client.id == "c1" and client.round == 1:
            raise Declined("Client c1 takes no part in round 1.")


@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_a_client_that_declines_does_not_end_the_run(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    method = Method("picky", before_training=(RefuseOnce(),))
    runs = [trained(which, method, rounds=2, min_share=0.5) for which in ("process", backend)]
    assert caplog.text.count("Client c1 takes no part in round 1.") >= 2
    assert set(runs[1].backend.losses_of_round) == {"c0", "c1", "c2", "c3", "c4"}
    assert largest_difference(runs[1], runs[0]) < 1e-4
