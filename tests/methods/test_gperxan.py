"""gPerXAN: PerXAN and guiding together, what travels, and identities."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from helpers.watching import messages
from polyfed.core.conversation import NEWCOMER
from polyfed.core.method import parse
from polyfed.errors import JoinError, OptionError, SharingError
from polyfed.runs.result import Result
from polyfed.testing import SIZES, check_method

trained = functools.partial(tiny_runs.trained, rounds=3)


BATCH_SIDE = {
    f"{layer}.{key}"
    for layer in ("stem.1", "branch.1")
    for key in ("score_bn", *(f"batch_side.{k}" for k in nn.BatchNorm2d(8).state_dict()))
}


def test_gperxan_is_perxan_and_guiding() -> None:
    joined = trained("perxan + guiding(weight=0.5)")
    whole = trained("gperxan")
    assert all(torch.equal(whole.server.state[name], value) for name, value in joined.server.state.items())
    assert Result(trained("gperxan(guide=0.0)"), []).digest == Result(trained("perxan"), []).digest
    assert not torch.equal(whole.server.state["stem.0.weight"], trained("perxan").server.state["stem.0.weight"])


def test_without_instance_side_and_guide_it_is_fedbn() -> None:
    ours = trained("gperxan(guide=0.0, instance_score=-10000.0)", weights="uniform", momentum=0.9)
    fedbn = trained("fedbn", weights="uniform", momentum=0.9)
    renamed = {name.replace("batch_side.", ""): value for name, value in ours.server.state.items()}
    compared = 0
    for name in fedbn.bench.plan.at(1).down:
        if not name.startswith("optimizer/"):
            torch.testing.assert_close(renamed[name], fedbn.server.state[name], rtol=0, atol=1e-6)
            compared += 1
    for client, kept in fedbn.backend.client_states.items():
        own = {name.replace("batch_side.", ""): value for name, value in ours.backend.client_states[client].entries.items()}
        for name, value in kept.entries.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6)
            compared += 1
    assert compared == 5 + 3 * 10


@pytest.mark.parametrize("text", ["perxan", "gperxan"])
def test_the_batch_side_goes_up_and_never_down(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained(text, rounds=2)
    whole = set(experiment.bench.model.state_dict())
    assert whole > BATCH_SIDE and len(seen) == 6
    for ask, reply in seen:
        assert set(reply.entries) == whole
        assert set(ask.payloads[reply.client].entries) == whole - BATCH_SIDE
        assert not reply.extras and not ask.payloads[reply.client].extras
    experiment.evaluate()
    assert not any(set(ask.payloads[reply.client].entries) & BATCH_SIDE for ask, reply in seen)
    assert not any(ask.purpose == NEWCOMER for ask, _ in seen)
    assert all(set(kept.entries) == BATCH_SIDE for kept in experiment.backend.client_states.values())


def test_the_newcomer_is_the_weighted_average_of_everything() -> None:
    experiment = trained("gperxan")
    state, total = experiment.newcomer_state(), sum(SIZES.values())
    for name in ("stem.1.batch_side.running_mean", "branch.1.batch_side.weight", "stem.1.score_bn"):
        mean = sum(SIZES[c] / total * experiment.backend.client_states[c].entries[name].double() for c in SIZES)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    spread = [experiment.backend.client_states[c].entries["stem.1.batch_side.running_mean"] for c in SIZES]
    assert not torch.equal(spread[0], spread[1])


@pytest.mark.parametrize(
    "text",
    [
        'gperxan(guide=1.0, where="stem", rest="shared", mix_local="both", in_init="ones")',
        'perxan(where=("branch",), mix_local="none", tiny_maps="skip")',
        'gperxan + momentum(keep="local") + fedprox(mu=0.01)',
        "fedbn + guiding(weight=1.0)",
    ],
)
def test_variants_keep_the_contract(text: str) -> None:
    check_method(text)


def test_options_are_checked_and_clashes_named() -> None:
    for text, told in {
        'gperxan(mix_local="bn")': "gperxan: mix_local",
        'perxan(rest="locl")': "Did you mean local",
        'perxan(in_init="zeros")': "in_init",
        'perxan(tiny_maps="pad")': "tiny_maps",
        "perxan(where=())": "where takes all",
        "perxan(where=3)": "where takes all",
        "gperxan(guide=-1.0)": "guide must not be negative",
        "guiding(weight=-0.5)": "weight must not be negative",
    }.items():
        with pytest.raises(OptionError, match=told):
            parse(text)
    with pytest.raises(JoinError, match="norm"):
        parse("gperxan + group_norm")
    with pytest.raises(SharingError, match="disagree"):
        trained("perxan + fedbn")
    assert str(parse("guiding + fedavg")) == "fedavg + guiding(weight=0.5)"
