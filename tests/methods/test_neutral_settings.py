"""Settings that switch a method off give FedAvg, to the bit."""

from __future__ import annotations

import functools

import pytest

from helpers import tiny_runs
from helpers.tiny_runs import digest_of, trained
from polyfed.core.method import parse
from polyfed.core.slots import SLOTS
from polyfed.runs.folder.checkpoint import digest


def test_neutral_settings_are_fedavg_to_the_bit() -> None:
    digest_of = functools.partial(tiny_runs.digest_of, rounds=3)
    plain = digest_of("fedavg")
    assert digest_of("fedprox(mu=0.0)") == plain
    assert digest_of('momentum(keep="none")') == plain
    assert digest_of('fedavg(statistics="average")') == plain
    assert digest_of("agc(clip=1e9)") == plain
    assert digest_of("fedprox(mu=0.01)") != plain
    assert digest_of("fedavg", seed=1) != plain


@pytest.mark.parametrize("text", ["ccst(alpha=0.0)", "elcfs(weight=0.0)"])
def test_a_neutral_setting_is_fedavg_to_the_bit(text: str) -> None:
    assert not any(parse(text).fills(slot) for slot in SLOTS)
    assert not parse(text).facts.data_derived_uploads
    assert digest(trained(text).snapshot()) == digest(trained("fedavg").snapshot())
    assert digest(trained(text.split("(")[0]).snapshot()) != digest(trained("fedavg").snapshot())


def test_neutral_settings_fill_no_slot_and_are_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg")
    for text in ("fedavgm(momentum=0.0)", "trimmed_mean(share=0.0)", "quantise(bits=32)", "topk(share=1.0)"):
        part = parse(text).parts[-1]
        assert not any(part.fills(slot) for slot in SLOTS), text
        assert digest_of(text) == plain, text
    assert digest_of("krum(keep=3)") == plain
    for text in ("fedavgm", "fedadam", "scaffold", "fednova", "median", "trimmed_mean", "krum", "quantise", "topk"):
        assert digest_of(text) != plain, text


def test_neutral_settings_of_domain_generalisation_are_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg")
    neutral = ["fedgma(tau=0.0)", 'fedgma(server_lr=0.0, variant="average_plus_step")', "rsc(features=0.0)", "rsc(batch=0.0)"]
    for text in (*neutral, "mixstyle(p=0.0)"):
        assert digest_of(text) == plain, text
    for text in ("fedgma", "rsc", "mixstyle"):
        assert digest_of(text) != plain, text
    assert digest_of("feddg_ga(step=0.0)") == digest_of("fedavg", weights="uniform") != plain
