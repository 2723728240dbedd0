"""The compositions that the papers compare train by one line, and each part of them has its effect."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.method import methods, parse
from polyfed.errors import JoinError
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation
from polyfed.text import read_sum

PRINTED = (
    "guiding + ibn",
    "guiding + dson",
    "guiding + elcfs",
    "guiding + ccst",
    "fedavg + agc",
    "fixbn + agc",
    "silobn + agc",
    "fedbn + agc",
    "fedavg + mixstyle",
    "fedavg + rsc",
)


def trained(method: str) -> Experiment:
    torch.manual_seed(5)
    # Two rounds: fixbn freezes half-way, and what stays local is first met again in the second.
    experiment = Experiment(Settings(method=method, rounds=2, batch_size=4, lr=0.1), tiny_federation(), model=TinyNet())
    experiment.train()
    return experiment


def learnt(experiment: Experiment, part: str) -> torch.Tensor:
    """Where a part must show: in the head, but silobn's statistics take no part in training and show in a client's predictions."""
    if part != "silobn":
        return experiment.server.state["head.weight"]
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return Result(experiment, []).model_for("small")(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", PRINTED)
def test_compositions_of_the_papers_train(text: str) -> None:
    names = [call.name for call in read_sum(text)]
    missing = [name for name in names if name not in methods.names()]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not registered yet")
    both = trained(text)
    assert {part.name for part in parse(text).parts} >= {name for name in names if name != "fedavg"}
    assert all(torch.isfinite(value).all() for value in both.server.state.values())
    rows = both.evaluate()
    assert {row.view for row in rows} == {"seen", "unseen"}
    for name in names:
        if name != "fedavg":  # it is what is underneath
            rest = trained(" + ".join(other for other in names if other != name))
            assert not torch.equal(learnt(both, name), learnt(rest, name)), f"{name} has no effect in {text}"


def test_parts_and_methods_are_written_as_such() -> None:
    assert str(parse("rsc")) == "fedavg + rsc"
    assert str(parse("mixstyle")) == "fedavg + mixstyle"
    assert str(parse("ibn + guiding")) == "fedavg + guiding(weight=0.5) + ibn"
    assert str(parse("fedgma")) == "fedgma(tau=0.7)"
    assert str(parse("feddg_ga")) == "feddg_ga(step=0.2)"
    with pytest.raises(JoinError, match="norm"):
        parse("ibn + dson")
    with pytest.raises(JoinError, match="norm"):
        parse("ibn + group_norm")
