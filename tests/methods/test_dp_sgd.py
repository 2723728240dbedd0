"""dp_sgd: the noise, the samples, the account, and what it refuses."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.tiny_runs import built, trained
from helpers.watching import AfterRound
from polyfed.core.client import Client
from polyfed.core.workbench import ClientState
from polyfed.errors import JoinError, ModelError, OptionError, PolyfedError, SettingError
from polyfed.methods.dp_sgd import MEMORY, NoisyGradient, clipped, dp_sgd
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import digest
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

pytest.importorskip("opacus", reason="needs the privacy extra")

from polyfed.methods._shared.privacy_budget import Budget, Randomness, noise_for

SIZES = {"one": 8, "two": 8, "three": 8}
FEDWON = "fedwon + dp_sgd(epsilon=8)"


def client_of(experiment: Experiment, name: str = "one", round_number: int = 1) -> Client:
    return Client(experiment.backend.data[name], experiment.bench, ClientState(), round_number)


def noisy(experiment: Experiment) -> NoisyGradient:
    own = experiment.method.batch_gradient
    assert isinstance(own, NoisyGradient)
    return own


# ------------------------------------------------------------------------------------------------------------------ account
def test_epsilon_is_that_of_opacus_on_the_same_schedule() -> None:
    from opacus.accountants import RDPAccountant

    experiment = trained(FEDWON, SIZES, rounds=3)
    accounts = experiment.server.memory["privacy"]
    for account in accounts.values():
        theirs = RDPAccountant()
        for _ in range(3 * 2):  # rounds times batches of 4 of 8 samples
            theirs.step(noise_multiplier=account["noise_multiplier"], sample_rate=0.5)
        assert account["epsilon_spent"] == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
        assert 8 * 0.999 <= account["epsilon_spent"] <= 8
        assert account["steps"] == 6
    assert set(accounts) == set(SIZES)


@pytest.mark.parametrize(("rate", "steps"), [(0.5, 6), (1.0, 40), (0.04, 480)])
def test_noise_for_a_plan_spends_the_budget_and_no_more(rate: float, steps: int) -> None:
    for epsilon in (1.0, 8.0):
        budget = Budget(epsilon, 1e-5)
        sigma = budget.multiplier(rate, steps)
        assert epsilon * 0.998 <= budget.spent([[sigma, rate, steps]]) <= epsilon
        if epsilon == 8.0 and steps == 6:
            assert budget.spent([[sigma, rate, 3], [sigma, rate, 3]]) == pytest.approx(budget.spent([[sigma, rate, 6]]), abs=1e-9)


def test_a_budget_that_no_noise_can_keep_is_refused() -> None:
    with pytest.raises(OptionError, match="Raise epsilon, or plan fewer rounds"):
        noise_for(1e-9, 1e-15, 1.0, 10**6)


def test_the_account_is_exact_after_kill_9_and_resume(tmp_path: Path) -> None:
    settings = Settings(method=FEDWON, rounds=4, batch_size=4, checkpoint_every="1")

    def experiment() -> Experiment:
        torch.manual_seed(3)
        return Experiment(settings, tiny_federation(SIZES), model=TinyNet())

    whole = experiment()
    whole.train()

    def killed(run: RunState) -> None:
        if run.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        train_run(experiment(), RunFolder(tmp_path / "run"), callbacks=[AfterRound(killed)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    torch.manual_seed(3)
    result = resume(tmp_path / "run", data=tiny_federation(SIZES), how=Reopening(model=TinyNet()))
    assert digest(result.experiment.snapshot()) == digest(whole.snapshot())
    found = result.summary()["privacy"]
    wanted = whole.server.memory["privacy"]
    assert found["clients"] == {name: pytest.approx(wanted[name], abs=1e-9) for name in SIZES}
    assert found["epsilon_spent"] == max(account["epsilon_spent"] for account in wanted.values())
    lines = [line for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "privacy"]
    assert [line["round"] for line in lines if line["client"] == "all"] == [1, 2, 3, 4]
    assert lines[-1]["privacy.epsilon_spent"] == found["epsilon_spent"]
    text = (tmp_path / "run" / "run.toml").read_text()
    assert 'noise_from = "seed"' in text and 'protects = "samples"' in text


def test_a_client_stops_when_its_budget_is_spent(caplog: pytest.LogCaptureFixture) -> None:
    experiment = built("fedwon + dp_sgd(epsilon=8, planned_rounds=1)", {"one": 8, "two": 8}, rounds=2, retries=0)
    with pytest.raises(PolyfedError, match="0 of 2 clients sent a valid reply"):
        experiment.train()
    assert experiment.server.round == 1
    assert "does not take part in round 2: it has spent epsilon = 7.99" in caplog.text
    assert all(account["epsilon_spent"] <= 8 for account in experiment.server.memory["privacy"].values())


def test_attempts_count_where_nobody_can_repeat_the_noise() -> None:
    experiment = built('fedwon + dp_sgd(epsilon=8, noise="system")', SIZES)
    client = client_of(experiment)
    client.attempt = 2
    assert noisy(experiment).after_round(client)[0][2] == 3 * 2
    seeded = built(FEDWON, SIZES)
    client = client_of(seeded)
    client.attempt = 2
    assert noisy(seeded).after_round(client)[0][2] == 2


# -------------------------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize("source", ["seed", "system"])
def test_noise_has_the_scale_that_was_asked_for(source: str) -> None:
    draws = Randomness(source, 0, ("test",)).add_noise(torch.zeros(10_000, dtype=torch.float64), 3.0)
    assert float(draws.mean()) == pytest.approx(0.0, abs=4 * 3.0 / 100)
    assert float(draws.std()) == pytest.approx(3.0, rel=4 / math.sqrt(2 * 10_000))
    assert float((draws.abs() < 3.0).double().mean()) == pytest.approx(0.6827, abs=0.02)
    assert float((draws.abs() < 6.0).double().mean()) == pytest.approx(0.9545, abs=0.01)


def test_gradients_of_an_empty_batch_are_noise_over_the_expected_batch() -> None:
    experiment = built(FEDWON, {"one": 8, "two": 8}, model=nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)))
    client, own = client_of(experiment), noisy(experiment)
    client.bench.model.train()
    found: list[torch.Tensor] = []
    index = 0
    while sum(map(len, found)) < 10_000:
        step = client.step(index, torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long))
        assert float(own(step)) == 0
        found += [p.grad.flatten() for p in client.bench.parameters.values() if p.grad is not None]
        index += 1
    scale = own.multiplier(client) * own.clip / 4
    draws = torch.cat(found)
    assert float(draws.std()) == pytest.approx(scale, rel=4 / math.sqrt(2 * len(draws)))
    assert float(draws.mean()) == pytest.approx(0.0, abs=4 * scale / 100)


def test_noise_is_new_for_every_step_round_and_client_and_the_same_again() -> None:
    like = torch.zeros(5)
    streams = [(MEMORY, r, c, "noise", i) for r in (1, 2) for c in ("a", "b") for i in (0, 1)]
    drawn = [tuple(Randomness("seed", 0, names).add_noise(like, 1.0).tolist()) for names in streams]
    assert len(set(drawn)) == len(streams)
    assert drawn == [tuple(Randomness("seed", 0, names).add_noise(like, 1.0).tolist()) for names in streams]
    system = [tuple(Randomness("system", 0, ("a",)).add_noise(like, 1.0).tolist()) for _ in range(2)]
    assert len(set(system)) == 2


def test_batches_are_poisson_samples() -> None:
    experiment = built(FEDWON, {"one": 40, "two": 40}, local_steps=400, batch_size=2)
    sampling = experiment.method.sampling
    assert sampling is not None
    batches = list(sampling(client_of(experiment)))
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    assert len(batches) == 400 and sizes.min() == 0 and sizes.max() > 4
    assert float(sizes.mean()) == pytest.approx(2.0, abs=4 * math.sqrt(2 * 0.95 / 400))
    counts = torch.bincount(torch.cat(batches), minlength=40)
    assert int(counts.min()) > 5 and int(counts.max()) < 45


def test_empty_and_odd_batches_are_trained_on() -> None:
    experiment = trained(FEDWON, {"one": 5, "two": 5}, batch_size=1, local_steps=6)
    assert all(torch.isfinite(value).all() for value in experiment.server.state.values())


def test_agc_acts_after_the_noise() -> None:
    experiment = built(f"{FEDWON} + agc(clip=0.001)", SIZES)
    client = client_of(experiment)
    client.receive(experiment.server.outgoing("one"))
    client.optimizer = client.make_optimizer()
    before = {name: value.detach().clone() for name, value in client.bench.parameters.items()}
    client.train_on(0, torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long))
    for name, value in client.bench.parameters.items():
        moved = (value.detach() - before[name]).norm() / client.lr
        assert float(moved) <= 0.0011 * max(float(before[name].norm()), math.sqrt(len(value)) * 1e-3)


# ----------------------------------------------------------------------------------------------------------------- refusals
def test_batch_norm_is_refused_by_name_before_round_1() -> None:
    with pytest.raises(ModelError) as error:
        built("fedavg + dp_sgd")
    for word in ("stem.1", "branch.1", "fedwon", "group_norm", "fixbn(freeze_at=0)", "--init"):
        assert word in str(error.value)
    with pytest.raises(ModelError, match=r"stem\.1"):
        built("fixbn(freeze_at=1) + dp_sgd")


def test_batch_norm_that_is_frozen_from_the_start_of_public_weights_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--init FILE"):
        built("fixbn(freeze_at=0) + dp_sgd")
    torch.save(TinyNet().state_dict(), tmp_path / "public.pth")
    experiment = trained("fixbn(freeze_at=0) + dp_sgd(epsilon=8)", SIZES, init=str(tmp_path / "public.pth"))
    assert any("must be of public data" in text for text in experiment.notices)
    statistics = {name: value for name, value in experiment.server.state.items() if "running" in name}
    assert statistics and all(torch.equal(value, experiment.bench.initial[name]) for name, value in statistics.items())
    assert not torch.equal(experiment.server.state["stem.1.weight"], experiment.bench.initial["stem.1.weight"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("feddg_ga + group_norm(groups=2) + dp_sgd", "feddg_ga uses the data in its before training"),
        ("guiding + group_norm(groups=2) + dp_sgd", "guiding uses the data in its objective"),
        ("rsc + group_norm(groups=2) + dp_sgd", "rsc uses the data in its task loss"),
        ("ccst + group_norm(groups=2) + dp_sgd", "ccst uses the data in its inputs"),
        ("mixstyle + group_norm(groups=2) + dp_sgd", "mixstyle mixes the samples"),
    ],
)
def test_what_looks_at_data_without_noise_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(JoinError, match=why):
        built(text)


class Coupled(nn.Module):
    """Takes the mean of the batch away, without being a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x - x.mean(0)).flatten(1))  # type: ignore[no-any-return]


class Noting(Coupled):
    """Counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Outside(Coupled):
    """Uses the weight of a layer without the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.flatten(1), self.head.weight)


@pytest.mark.parametrize(
    ("model", "why"), [(Coupled, "affects the output for another"), (Noting, "in seen"), (Outside, "head.weight")]
)
def test_models_without_gradients_by_sample_are_refused(model: type[nn.Module], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        built("fedavg + dp_sgd", model=model())


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingError, match="--amp off"):
        built(FEDWON, amp="bfloat16")
    with pytest.raises(SettingError, match="--sampling balanced does not work with"):
        built(FEDWON, sampling="balanced")
    with pytest.raises(SettingError, match="--backend process"):
        built(FEDWON, backend="fused")
    with pytest.raises(SettingError, match="--compile off"):
        built(FEDWON, compile="on")


@pytest.mark.parametrize("bad", [[3], [0, 1, 2, 3]])
def test_samples_whose_gradient_is_not_finite_count_as_zero(bad: list[int]) -> None:
    experiment = built(FEDWON, SIZES)
    client = client_of(experiment)
    client.receive(experiment.server.outgoing("one"))
    x, y = (part.clone() for part in client.data.train.batch(slice(0, 4)))
    x = client.bench.preparation.for_testing(x)
    good = [row for row in range(4) if row not in bad]
    wanted = clipped(client, client.step(0, x[good], y[good]), 1.0) if good else {}
    x[bad, 0, 0, 0] = math.inf
    step = client.step(0, x, y)
    step.task_loss = torch.zeros(())
    found = clipped(client, step, 1.0)
    assert set(found) == set(wanted) and math.isfinite(float(step.task_loss))
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[parameter])


@pytest.mark.parametrize("clip", [1e-30, 1e7, 0.0, math.nan])
def test_a_clip_beyond_single_precision_is_refused(clip: float) -> None:
    with pytest.raises(OptionError, match="dp_sgd: clip must be between 1e-06 and 1e\\+06"):
        dp_sgd(clip=clip)


# ------------------------------------------------------------------------------------------------------------ joined, digests
def test_parts_that_work_on_noisy_values_compose() -> None:
    experiment = trained("scaffold + fedprox(mu=0.1) + quantise(bits=8) + group_norm(groups=2) + dp_sgd(epsilon=8) + agc", SIZES)
    assert experiment.server.memory["privacy"]["one"]["epsilon_spent"] <= 8


def test_the_pull_of_fedprox_is_in_the_gradient_without_noise() -> None:
    experiment = built("fedprox(mu=2.0) + group_norm(groups=2) + dp_sgd(epsilon=8)", SIZES)
    plain = built("fedavg + group_norm(groups=2) + dp_sgd(epsilon=8)", SIZES)
    gradients = []
    for each in (experiment, plain):
        client = client_of(each)
        client.receive(each.server.outgoing("one"))
        with torch.no_grad():
            for parameter in client.bench.parameters.values():
                parameter.add_(0.5)
        client.bench.model.train()
        noisy(each)(client.step(0, torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)))
        gradients.append({name: p.grad for name, p in client.bench.parameters.items()})
    for name, wanted in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], wanted + 2.0 * 0.5)


def test_workers_train_to_the_same_digest() -> None:
    one = trained(FEDWON, SIZES)
    two = built(FEDWON, SIZES, workers="2")
    try:
        two.train()
        assert digest(two.snapshot()) == digest(one.snapshot())
    finally:
        two.backend.close()
    other = trained(FEDWON, SIZES, seed=1)
    assert digest(other.snapshot()) != digest(one.snapshot())


def test_the_systems_generator_gives_another_run_every_time() -> None:
    text = 'fedwon + dp_sgd(epsilon=8, noise="system")'
    one, two = trained(text, SIZES, rounds=1), trained(text, SIZES, rounds=1)
    assert digest(one.snapshot()) != digest(two.snapshot())
    assert not any("noise from the run's seed" in text for text in one.notices)
    assert any("noise from the run's seed" in text for text in trained(FEDWON, SIZES, rounds=1).notices)


def test_the_training_loss_stays_at_the_client() -> None:
    assert not trained(FEDWON, SIZES, rounds=1).backend.losses_of_round
    assert trained("fedwon", SIZES, rounds=1).backend.losses_of_round


@pytest.mark.parametrize(
    "loss", ["weighted_focal", 'cross_entropy(class_weights="balanced")', "cross_entropy(class_weights=(1.0, 2.0, 3.0))"]
)
def test_losses_with_class_weights_are_refused(loss: str) -> None:
    with pytest.raises(SettingError, match=r"weights samples by class.*Use a loss without class weights"):
        built(FEDWON, SIZES, loss=loss)
    assert built(FEDWON, SIZES, loss="cross_entropy").method
