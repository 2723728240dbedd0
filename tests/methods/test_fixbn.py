"""FixBN: two stages, what travels in each, identities, and the rows of Table H."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed
from helpers import tiny_runs
from helpers.watching import watched
from polyfed.core.client import Client
from polyfed.core.method import parse
from polyfed.core.seeds import generator
from polyfed.core.workbench import ClientState
from polyfed.errors import ClientFailure, JoinError, ModelError, OptionError, SharingError
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

built = functools.partial(tiny_runs.built, rounds=3)
trained = functools.partial(tiny_runs.trained, rounds=3)
digest_of = functools.partial(tiny_runs.digest_of, rounds=3)


EQUAL = {"a": 6, "b": 6, "c": 6}


def states(method: str, **changes: Any) -> dict[int, dict[str, Tensor]]:
    """The server's state after every round."""
    experiment = built(method, **changes)
    seen: dict[int, dict[str, Tensor]] = {}
    experiment.train([lambda server: seen.__setitem__(server.round, dict(server.state))])
    return seen


STATISTICS = ("stem.1.running_mean", "stem.1.running_var", "stem.1.num_batches_tracked", "branch.1.running_mean")


AFFINE = ("stem.1.weight", "stem.1.bias", "branch.1.weight")


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: tuple[str, ...]) -> set[bool]:
    return {not torch.equal(before[name], after[name]) for name in names}


def test_a_freeze_after_the_last_round_is_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg", momentum=0.9)
    nothing = 'fixbn(freeze="nothing", decay=None)'
    for text in ("fixbn(freeze_at=3)", "fixbn(freeze_at=1.0)", 'fixbn(freeze_at=3, freeze="both")', nothing):
        assert digest_of(text, momentum=0.9) == plain, text
    assert digest_of("fixbn(freeze_at=2)", momentum=0.9) != plain


STEPS = "steps(at=(0.5, 0.75), factor=0.1)"


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 7])
def test_the_default_decay_is_the_schedule_of_the_paper_to_the_bit(rounds: int) -> None:
    bare = digest_of("fixbn(decay=None)", rounds=rounds, schedule=STEPS)
    assert digest_of("fixbn", rounds=rounds) == bare
    assert digest_of("fixbn(decay=None)", rounds=rounds) != bare


@pytest.mark.parametrize("schedule", ["cosine", "steps(at=(), factor=0.1)", "steps(at=(0.9,), factor=0.5)"])
def test_a_schedule_of_the_run_wins_over_the_decay(schedule: str) -> None:
    assert digest_of("fixbn", rounds=4, schedule=schedule) == digest_of("fixbn(decay=None)", rounds=4, schedule=schedule)


def test_a_schedule_given_in_python_wins_over_the_decay() -> None:
    given = {"schedule": lambda number, rounds: 1.0, "rounds": 4, "batch_size": 4}
    runs = [polyfed.run(tiny_federation(), text, TinyNet, **given) for text in ("fixbn", "fixbn(decay=None)")]
    assert runs[0].digest == runs[1].digest


@pytest.mark.parametrize(
    ("freeze_at", "rounds", "rates"),
    [
        ("0.5", 4, [1, 1, 0.1, 0.01]),
        ("0.9", 20, [1] * 18 + [0.1, 0.01]),
        ("4", 10, [1] * 4 + [0.1] * 3 + [0.01] * 3),
        ("0", 4, [1, 1, 0.1, 0.1]),
        ("0.5", 1, [1]),
        ("4", 4, [1] * 4),
        ("1.0", 4, [1] * 4),
    ],
)
def test_the_rate_falls_at_the_freeze_and_half_way_to_the_end(freeze_at: str, rounds: int, rates: list[float]) -> None:
    experiment = built(f"fixbn(freeze_at={freeze_at})", rounds=rounds, lr=1.0)
    assert [stage(experiment, number).lr for number in range(1, rounds + 1)] == pytest.approx(rates)


def test_only_a_constant_rate_is_warned_of() -> None:
    assert any("remove decay=None" in notice for notice in built("fixbn(decay=None)").notices)
    for text, schedule in (("fixbn", "constant"), ("fixbn(decay=None)", STEPS)):
        assert not any("constant" in notice for notice in built(text, schedule=schedule).notices)


def test_the_first_stage_is_fedavg() -> None:
    fixed, plain = states("fixbn(freeze_at=2)", rounds=4), states("fedavg", rounds=4)
    for number in (1, 2):
        assert all(torch.equal(fixed[number][name], value) for name, value in plain[number].items())


@pytest.mark.parametrize(
    ("freeze", "statistics", "affine"),
    [("statistics", False, True), ("both", False, False), ("affine", True, False), ("nothing", True, True)],
)
def test_table_h_what_is_frozen_is_constant_and_the_rest_moves(freeze: str, statistics: bool, affine: bool) -> None:
    seen = states(f'fixbn(freeze_at=2, freeze="{freeze}")', rounds=4, momentum=0.9, weight_decay=0.01)
    assert moved(seen[1], seen[2], STATISTICS + AFFINE + ("head.weight",)) == {True}
    for number in (3, 4):
        assert moved(seen[2], seen[number], STATISTICS) == {statistics}
        assert moved(seen[2], seen[number], AFFINE) == {affine}
        assert moved(seen[2], seen[number], ("stem.0.weight", "head.weight")) == {True}


def test_a_frozen_affine_is_left_trainable() -> None:
    experiment = trained('fixbn(freeze_at=1, freeze="both")')
    assert all(parameter.requires_grad for parameter in experiment.bench.model.parameters())


def test_half_of_the_rounds_is_rounded_down_with_the_schedule() -> None:
    seen = states("fixbn", rounds=5)
    assert moved(seen[1], seen[2], STATISTICS) == {True} and moved(seen[2], seen[3], STATISTICS) == {False}
    settings = Settings(rounds=5, lr=1.0, schedule="steps(at=(0.5,), factor=0.1)")
    assert [settings.lr_at(number) for number in (2, 3)] == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize(("freeze", "withheld"), [("statistics", STATISTICS), ("affine", AFFINE), ("both", STATISTICS + AFFINE)])
def test_what_is_frozen_still_comes_down_and_no_longer_goes_up(freeze: str, withheld: tuple[str, ...]) -> None:
    experiment = built(f'fixbn(freeze_at=2, freeze="{freeze}")')
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    assert seen[1, "train"] == seen[2, "train"] == (everything, everything)
    down, up = seen[3, "train"]
    assert down == everything
    kinds = {"stem.1.", "branch.1."}
    missing = everything - up
    assert set(withheld) <= missing and all(any(name.startswith(kind) for kind in kinds) for name in missing)
    assert len(missing) == {"statistics": 6, "affine": 4, "both": 10}[freeze]
    assert not experiment.backend.client_states


def test_every_client_predicts_with_the_servers_statistics() -> None:
    experiment = trained("fixbn(freeze_at=1)")
    for client in ("big", "small"):
        model = Result(experiment, []).model_for(client)
        assert all(torch.equal(model.state_dict()[name], experiment.server.state[name]) for name in STATISTICS)


def stage(experiment: Experiment, number: int) -> Client:
    """A client about to train in some round."""
    client = Client(experiment.federation.clients[0], experiment.bench, ClientState(), number)
    client.receive(experiment.server.outgoing(client.id))
    client.model.train()
    for hook in experiment.method.before_training:
        hook(client)
    return client


def test_the_gradient_of_a_sample_does_not_depend_on_its_batch() -> None:
    experiment = trained("fixbn(freeze_at=1)")
    gradients: dict[int, list[Tensor]] = {1: [], 2: []}
    for number, found in gradients.items():
        client = stage(experiment, number)
        x, y = client.data.train.batch(slice(0, 5))
        x = experiment.bench.preparation.for_testing(x)
        for others in ([1, 2], [3, 4]):
            chosen = x[[0, *others]].requires_grad_()
            loss = nn.functional.cross_entropy(client.model(chosen), y[[0, *others]], reduction="none")[0]
            found.append(torch.autograd.grad(loss, chosen)[0])
    first, second = gradients[2]
    torch.testing.assert_close(first[0], second[0], rtol=1e-5, atol=1e-8)
    assert torch.equal(first[1:], torch.zeros_like(first[1:]))
    first, second = gradients[1]
    assert not torch.allclose(first[0], second[0], rtol=1e-3) and bool(first[1:].abs().max() > 0)


def frozen(model: nn.Module) -> nn.Module:
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def test_one_full_step_a_round_is_sgd_on_the_union() -> None:
    federation = tiny_federation(EQUAL)
    experiment = built("fixbn(freeze_at=1, decay=None)", federation, rounds=4, batch_size=6, local_steps=1, lr=0.1)
    seen: dict[int, dict[str, Tensor]] = {}
    experiment.train([lambda server: seen.__setitem__(server.round, dict(server.state))])
    union = federation.pooled().clients[0].train
    x, y = union.batch(slice(0, 18))
    model = TinyNet()
    model.load_state_dict(seen[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (2, 3, 4):
        optimizer.zero_grad()
        logits = frozen(model)(federation.preparation.for_testing(x))
        nn.functional.cross_entropy(logits, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen[number][name], value, rtol=1e-5, atol=1e-6)


def test_central_with_fixbn_is_plain_training_in_two_stages() -> None:
    federation = tiny_federation()
    experiment = trained("central + fixbn(freeze_at=1, decay=None)", federation, momentum=0.9, lr=0.02)
    torch.manual_seed(3)
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train = federation.pooled().clients[0].train
    for number in (1, 2, 3):
        model = model.train() if number == 1 else frozen(model)  # type: ignore[assignment]
        for chunk in torch.randperm(26, generator=generator(0, "client", number, "pooled")).split(4):
            x, y = train.batch(chunk)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(experiment.server.state[name], value), name


class FlatNet(nn.Module):
    """Batch norm over features without positions, where a training batch of one sample has no spread."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_batches_of_one_sample_train_once_statistics_are_frozen() -> None:
    settings: dict[str, Any] = {"model": FlatNet(), "batch_size": 1, "last_batch": "keep", "lr": 0.01}
    state = trained("fixbn(freeze_at=0)", **settings).server.state
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
    assert torch.equal(state["body.2.running_var"], torch.ones(8))
    with pytest.raises(ClientFailure, match="more than 1 value"):
        trained("fixbn(freeze_at=1)", **settings)


def test_maintained_momentum_is_still_exchanged_in_the_second_stage() -> None:
    seen = watched(built('fixbn(freeze_at=1) + momentum(keep="global")', momentum=0.9))
    down, up = seen[3, "train"]
    assert "optimizer/momentum_buffer/stem.1.weight" in down & up


def test_what_it_cannot_work_on_says_so() -> None:
    with pytest.raises(OptionError, match="the run has 3 rounds"):
        trained("fixbn(freeze_at=4)")
    with pytest.raises(OptionError, match="the run has 3 rounds"):
        trained('fixbn(freeze_at=4, freeze="affine")')
    with pytest.raises(SharingError, match="no batch-norm statistics"):
        trained("fixbn + group_norm(groups=2)")
    model = TinyNet()
    model.stem[1] = nn.BatchNorm2d(8, track_running_stats=False)
    with pytest.raises(ModelError, match=r"stem\.1 keeps no running statistics"):
        trained("fixbn", model=model)


def test_text() -> None:
    assert str(parse("fixbn")) == "fixbn(freeze_at=0.5, decay=0.1)"
    assert str(parse("fixbn(90, decay=None)")) == "fixbn(freeze_at=90, decay=None)"
    with pytest.raises(JoinError, match="round"):
        parse('local + fixbn(stage_one="decoupled")')


def test_decoupled_averages_statistics_first_and_trains_with_them() -> None:
    federation = tiny_federation(EQUAL)
    experiment = built('fixbn(freeze_at=1.0, stage_one="decoupled")', federation, rounds=1, batch_size=6, local_steps=1)
    seen = watched(experiment)
    assert {what for _, what in seen} == {"batch_norm_statistics", "train"}
    _, up = seen[1, "batch_norm_statistics"]
    assert up == {name for name in TinyNet().state_dict() if "running" in name or "num_batches" in name}
    torch.manual_seed(3)
    start = TinyNet()
    batches = [c.train.batch(slice(0, 6)) for c in federation.clients]
    prepared = [(federation.preparation.for_testing(x), y) for x, y in batches]
    measured = []
    for x, _ in prepared:
        model = copy.deepcopy(start).train()
        model(x)
        measured.append(model.state_dict())
    mean = {name: torch.stack([m[name] for m in measured]).mean(0) for name in up if "running" in name}
    shared = copy.deepcopy(start)
    shared.load_state_dict(start.state_dict() | mean)
    ends = []
    for x, y in prepared:
        model = frozen(copy.deepcopy(shared))  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ends.append(model.state_dict())
    for name, value in experiment.server.state.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([end[name] for end in ends]).mean(0), rtol=1e-5, atol=1e-6)
    assert int(experiment.server.state["stem.1.num_batches_tracked"]) == 1


def test_decoupled_ends_at_the_freeze() -> None:
    seen = watched(built('fixbn(freeze_at=2, stage_one="decoupled")'))
    assert {number for number, what in seen if what == "batch_norm_statistics"} == {1, 2}


def test_a_repeated_decoupled_round_starts_from_the_same_statistics() -> None:
    experiment = built('fixbn(freeze_at=1.0, stage_one="decoupled")', rounds=1, retries=1)
    plain = built('fixbn(freeze_at=1.0, stage_one="decoupled")', rounds=1)
    plain.train()
    absorb, calls = experiment.server.aggregate, []

    def fail_once(replies: Any) -> None:
        calls.append(1)
        absorb(() if len(calls) == 1 else replies)

    experiment.server.aggregate = fail_once  # type: ignore[method-assign]
    experiment.train()
    assert len(calls) == 2 and Result(experiment, []).digest == Result(plain, []).digest


def test_a_freeze_before_round_one_is_said() -> None:
    assert any("initial statistics" in notice for notice in built("fixbn", rounds=1).notices)
    assert not any("initial statistics" in notice for notice in built("fixbn", rounds=2).notices)
