"""Check that membership inference finds the members of a model that has memorised them, and none otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.tiny_runs import built, trained
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.studies.analyse import leakage
from polyfed.studies.analyse.gradient_inversion import draw, in_best_order, invert
from polyfed.studies.analyse.leakage import area, likelihood_ratio, membership, pool_of, true_positive_rate
from polyfed.testing import TinyNet


def noise_federation(count: int = 40) -> Federation:
    """Return images with random labels, which a model can only memorise."""
    stream = torch.Generator().manual_seed(0)
    clients = []
    for name in ("a", "b"):
        parts = [
            ArrayExamples(
                torch.randint(0, 255, (count, 3, 8, 8), generator=stream, dtype=torch.uint8),
                torch.randint(0, 3, (count,), generator=stream),
            )
            for _ in range(2)
        ]
        clients.append(ClientData(name, (name,), parts[0], {name: parts[1]}))
    return Federation("noise", ("0", "1", "2"), tuple(clients))


def test_numbers_of_an_attack_by_hand() -> None:
    members, others = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 0.0])
    assert area(members, others) == pytest.approx((2 + 1.5 + 1) / 6)
    assert true_positive_rate(members, others, 0.01) == pytest.approx(1 / 3)
    assert true_positive_rate(members, others, 0.5) == 1.0
    assert true_positive_rate(torch.rand(10_000), torch.rand(10_000), 0.01) == pytest.approx(0.01, abs=0.006)


def test_a_likelihood_ratio_by_hand() -> None:
    inside = torch.tensor([[True, False], [False, True], [True, False], [False, True]])
    shadows = torch.tensor([[5.0, 0.0], [1.0, 4.0], [6.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    found = likelihood_ratio(torch.tensor([5.5, 0.5], dtype=torch.float64), inside, shadows)
    assert float(found[0]) > 5 and float(found[1]) < -5


@pytest.fixture(scope="module")
def memorised() -> dict[str, object]:
    experiment = trained("local", noise_federation(), TinyNet(), rounds=12, local_epochs=6, lr=0.3, momentum=0.9, batch_size=8)
    return membership(experiment, shadows=2, model=TinyNet())


def test_memorised_samples_are_found(memorised: dict[str, dict[str, dict[str, float]]]) -> None:
    assert memorised["lower_bounds"] is True and memorised["shadow_runs"] == 2
    assert set(memorised["clients"]) == set(memorised["domains"]) == {"a", "b"}
    for attack in ("loss", "lira"):
        assert memorised["all"][attack]["auc"] > 0.6  # type: ignore[index]
        assert 0 <= memorised["all"][attack]["tpr_at_1_percent_fpr"] <= 1  # type: ignore[index]
    assert memorised["all"]["members"] == memorised["all"]["others"] == 80


def test_an_untrained_model_leaks_nothing() -> None:
    found = membership(built("fedavg", noise_federation(400), TinyNet()))
    assert found["all"]["loss"]["auc"] == pytest.approx(0.5, abs=0.06)
    assert "lira" not in found["all"]
    with pytest.raises(SettingError, match="pairs"):
        membership(built("fedavg"), shadows=3)


def test_members_come_from_training_and_others_from_tests_of_the_same_domain() -> None:
    client = noise_federation().clients[0]
    pool = pool_of(client, 10, 0)
    assert pool.members == 10 and len(pool.examples) == 20
    train = {tuple(row.flatten().tolist()) for row in client.train.batch(slice(None))[0]}
    rows = [tuple(row.flatten().tolist()) in train for row in pool.examples.batch(slice(None))[0]]
    assert rows == [True] * 10 + [False] * 10


def test_few_shadow_runs_find_members_of_unequal_samples() -> None:
    """Samples differ far more than membership adds, so estimates per sample would be too noisy."""
    stream = torch.Generator().manual_seed(0)
    ease, gain = 4 * torch.randn(2000, generator=stream, dtype=torch.float64), 1.0
    inside = torch.zeros(4, 2000, dtype=torch.bool)
    for number in (0, 2):
        inside[number, torch.randperm(2000, generator=stream)[:1000]] = True
        inside[number + 1] = ~inside[number]
    shadows = ease + gain * inside + torch.randn(4, 2000, generator=stream, dtype=torch.float64)
    own = ease + gain * (torch.arange(2000) < 1000) + torch.randn(2000, generator=stream, dtype=torch.float64)
    ratio = likelihood_ratio(own, inside, shadows)
    assert area(ratio[:1000], ratio[1000:]) > 0.70 > 0.60 > area(own[:1000], own[1000:])


def test_shadow_runs_train_on_about_as_many_samples_as_the_run_however_few_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, sizes, chosen = trained("fedavg", rounds=1), [], []
    original = leakage.shadow_of

    def noting(run: Experiment, pools: Any, members: Any, *rest: Any) -> Experiment:
        shadow = original(run, pools, members, *rest)
        sizes.append({client.id: len(client.train) for client in shadow.federation.clients})
        chosen.append({name: members[name][pool.places] for name, pool in pools.items()})
        return shadow

    monkeypatch.setattr(leakage, "shadow_of", noting)
    membership(experiment, shadows=2, maximum=2, model=TinyNet())
    for client in experiment.federation.clients:
        rest = sum(len(client.tests[domain]) for domain in client.domains)
        count = len(client.train) + min(len(client.train), rest)
        assert [each[client.id] for each in sizes] == [(count + 1) // 2, count // 2]
        pool = pool_of(client, 2, 0)
        assert torch.equal(pool.whole.subset(pool.places).batch(slice(None))[0], pool.examples.batch(slice(None))[0])
        assert torch.equal(chosen[0][client.id], ~chosen[1][client.id])


def test_images_of_one_label_are_compared_in_their_best_order() -> None:
    x = torch.stack([torch.full((1, 2, 2), value) for value in (0.0, 1.0, 2.0)])
    found = in_best_order(x[[1, 0, 2]] + 0.1, x, torch.tensor([7, 7, 3]))
    assert torch.allclose(found, x + 0.1)
    assert torch.allclose(in_best_order(x[[1, 0, 2]], x, torch.tensor([7, 8, 3])), x[[1, 0, 2]]), "labels are known"


def test_a_gradient_leaks_its_image(tmp_path) -> None:  # type: ignore[no-untyped-def]
    few, many = (invert(Settings(data="digits-mini"), ["fedavg + group_norm"], images=1, steps=steps)[0] for steps in (1, 40))
    assert many["cosine_distance"] < few["cosine_distance"]
    low, high = many["pixels"]
    assert bool((many["found"] >= low).all()) and bool((many["found"] <= high).all())
    assert many["lower_bounds"] is True and many["found"].shape == many["original"].shape
    draw([few, many], tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000
