"""dp_fedavg: clipped updates, the noise at the server and at clients, the clip that adapts, and the account."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.tiny_runs import built, trained
from polyfed.core.client import Client
from polyfed.core.privacy import departures
from polyfed.core.server import Server
from polyfed.core.workbench import ClientState
from polyfed.errors import Declined, JoinError, OptionError
from polyfed.methods.dp_fedavg import (
    BELOW,
    CLIP,
    MEMORY,
    AddNoise,
    ClipUpdate,
    MoveClip,
    ReportBelowClip,
    changes,
    dp_fedavg,
    length,
)
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import digest

pytest.importorskip("opacus", reason="needs the privacy extra")

PLAIN = "dp_fedavg(epsilon=8.0, adaptive=False)"


def at_work(experiment: Experiment, clip: float) -> tuple[Client, dict[str, torch.Tensor]]:
    """A client that has moved every entry by 1, and what it would upload."""
    client = Client(experiment.backend.data["big"], experiment.bench, ClientState(), 1)
    client.extras = {CLIP: clip}
    client.receive(experiment.server.outgoing("big"))
    entries = {name: client.received[name] + 1 for name in client.phase.up}
    return client, entries


def uploading(experiment: Experiment) -> ClipUpdate:
    (found,) = experiment.method.uploads
    assert isinstance(found, ClipUpdate)
    return found


def test_an_update_is_clipped_over_all_entries_together() -> None:
    experiment = built(PLAIN)
    client, entries = at_work(experiment, 0.5)
    raw, found = changes(client, entries), changes(client, uploading(experiment)(client, entries))
    assert length(raw) > 5 and length(found) == pytest.approx(0.5, rel=1e-4)
    for name, value in found.items():
        torch.testing.assert_close(value, raw[name] * 0.5 / length(raw), rtol=1e-3, atol=1e-6)
    assert "stem.1.running_mean" in found  # statistics are part of what is clipped
    client, entries = at_work(experiment, 1e6)
    torch.testing.assert_close(changes(client, uploading(experiment)(client, entries)), changes(client, entries))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_counts_as_zero(value: float) -> None:
    """A comparison with NaN is false: one such entry would let all others through unclipped."""
    experiment = built(PLAIN)
    client, entries = at_work(experiment, 0.5)
    entries["stem.1.running_mean"][0] = value
    assert length(changes(client, uploading(experiment)(client, entries))) == 0


@pytest.mark.parametrize("clip", [math.nan, math.inf, 0.0, -1.0, 1e-7, 1e7])
def test_a_clip_that_is_none_is_declined_by_the_client_and_refused_as_an_option(clip: float) -> None:
    experiment = built("dp_fedavg(epsilon=8.0)")
    client, entries = at_work(experiment, clip)
    say = next(hook for hook in experiment.method.after_training if isinstance(hook, ReportBelowClip))
    for use in (lambda: uploading(experiment)(client, entries), lambda: say(client)):
        with pytest.raises(Declined, match=r"invalid clip from the server \(clip must be between 1e-06 and 1e\+06"):
            use()
    with pytest.raises(OptionError, match="dp_fedavg: clip must be between 1e-06 and"):
        dp_fedavg(clip=clip)


def test_a_clip_that_moves_stays_within_its_bounds() -> None:
    experiment = built("dp_fedavg(epsilon=8.0)")
    move = next(hook for hook in experiment.method.after_round if isinstance(hook, MoveClip))
    for clip, below in ((1.01e-6, 0.5), (0.99e6, -0.5)):
        experiment.server.memory[MEMORY] = {"clip": clip}
        for _ in range(5):
            move(experiment.server, {str(k): {BELOW: below} for k in range(2000)})
        assert experiment.server.memory[MEMORY]["clip"] in (1e-6, 1e6)


def test_noise_at_the_client_and_at_the_server_have_their_scales() -> None:
    at_client = built('dp_fedavg(epsilon=8.0, adaptive=False, noise_at="client")')
    client, _ = at_work(at_client, 2.0)
    z = uploading(at_client).combined(2)
    draws = []
    while sum(map(len, draws)) < 10_000:
        client.round += 1
        noisy = changes(
            client, uploading(at_client)(client, {n: v.clone() for n, v in client.received.items() if n in client.phase.up})
        )
        draws += [noisy[name].flatten() for name in client.bench.parameters]
    assert float(torch.cat(draws).std()) == pytest.approx(2.0 * z, rel=4 / math.sqrt(2 * 10_000))

    at_server = built(PLAIN)
    step, server = at_server.method.server_step, at_server.server
    assert isinstance(step, AddNoise)
    server.memory[MEMORY], server.num_aggregated = {"clip": 2.0}, 4
    counter = "stem.1.num_batches_tracked"
    found = step(server, {"head.weight": torch.zeros(10_000), counter: torch.tensor(3), "stem.1.running_var": torch.zeros(50)})
    assert float(found["head.weight"].std()) == pytest.approx(2.0 * z / 4, rel=4 / math.sqrt(2 * 10_000))
    assert int(found[counter]) == 3 and float(found["stem.1.running_var"].min()) == 0


def test_a_question_before_training_does_not_halve_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoupled fixbn weighs every client twice in a round."""
    counted = []
    original = AddNoise.__call__

    def noting(self: AddNoise, server: Server, aggregate: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counted.append(server.num_aggregated)
        return original(self, server, aggregate)

    monkeypatch.setattr(AddNoise, "__call__", noting)
    experiment = trained(f'{PLAIN} + fixbn(freeze_at=1.0, stage_one="decoupled")', rounds=2)
    assert counted == [len(experiment.server.clients)] * 2


def test_the_share_below_the_clip_takes_its_part_of_the_noise() -> None:
    own = uploading(built("dp_fedavg(epsilon=8.0)"))
    z, update, share = own.combined(20), own.on_update(20, 100), own.on_share(20, 100)
    assert update**-2 + share**-2 == pytest.approx(z**-2)
    assert own.on_share(20, 10_000) == 500


@pytest.mark.parametrize("clients", [1, 100, 10_000])
def test_updates_and_bits_together_stay_within_the_budget(clients: int) -> None:
    """Worked out without an accountant: 20 rounds of Gaussian noise are one, whose delta has a closed form (Balle and Wang, 2018)."""
    experiment = built("dp_fedavg(epsilon=8.0)")
    own = uploading(experiment)
    say = next(hook for hook in experiment.method.after_training if isinstance(hook, ReportBelowClip))
    client, _ = at_work(experiment, 1.0)
    zero = say(client)[BELOW]
    with torch.no_grad():
        next(iter(client.bench.parameters.values())).add_(1.0)
    moved = abs(zero - say(client)[BELOW])  # what one client changes in the sum of bits; in the sum of updates it is S
    distance = math.sqrt(20 * (own.on_update(20, clients) ** -2 + (moved / own.on_share(20, clients)) ** 2))

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    delta = below(distance / 2 - 8 / distance) - math.exp(8) * below(-distance / 2 - 8 / distance)
    assert 1e-7 < delta <= 1e-5


def test_the_clip_follows_the_quantile() -> None:
    experiment = built("dp_fedavg(epsilon=1e6, clip=1.0)")
    move = next(hook for hook in experiment.method.after_round if isinstance(hook, MoveClip))
    server = experiment.server
    for below, wanted in ((0.5, math.exp(-0.1)), (-0.5, math.exp(0.1))):
        server.memory[MEMORY] = {"clip": 1.0}
        server.round = 1
        move(server, {str(k): {BELOW: below} for k in range(2000)})
        assert server.memory[MEMORY]["clip"] == pytest.approx(wanted, rel=0.02)
    say = next(hook for hook in experiment.method.after_training if isinstance(hook, ReportBelowClip))
    client, _ = at_work(experiment, 1.0)
    assert say(client) == {BELOW: 0.5}  # it has changed nothing yet
    with torch.no_grad():
        next(iter(client.bench.parameters.values())).add_(1.0)
    assert say(client) == {BELOW: -0.5}


@pytest.mark.parametrize("text", ["dp_fedavg(epsilon=8.0)", 'dp_fedavg(epsilon=8.0, noise_at="client") + fedbn'])
def test_rounds_are_counted_as_opacus_counts_them(text: str) -> None:
    from opacus.accountants import RDPAccountant

    experiment = trained(text, rounds=3, clients_per_round=2)
    accounts = experiment.server.memory["privacy"]
    assert sum(account["steps"] for account in accounts.values()) == 6
    for account in accounts.values():
        theirs = RDPAccountant()
        for _ in range(account["steps"]):
            theirs.step(noise_multiplier=account["noise_multiplier"], sample_rate=1.0)
        assert account["epsilon_spent"] == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
        assert account["epsilon_spent"] <= 8
    assert all(torch.isfinite(value).all() for value in experiment.server.state.values())


def test_workers_train_to_the_same_digest() -> None:
    one, two = trained("dp_fedavg(epsilon=8.0)"), built("dp_fedavg(epsilon=8.0)", workers="2")
    try:
        two.train()
        assert digest(two.snapshot()) == digest(one.snapshot())
    finally:
        two.backend.close()


def test_what_would_escape_is_refused_or_said() -> None:
    with pytest.raises(JoinError, match="uploaded but not sent down"):
        built(f'{PLAIN} + momentum(keep="global")', momentum=0.9)
    with pytest.raises(JoinError, match="reduces updates differently"):
        built(f"{PLAIN} + median")
    with pytest.raises(JoinError, match="both use the name 'privacy'"):
        built(f"{PLAIN} + dp_sgd + group_norm(groups=2)")
    local = " ".join(built(f"{PLAIN} + fedbn").notices)
    assert "layers that stay at clients" in local
    scores = " ".join(built("dp_fedavg(epsilon=8.0, adaptive=False) + scaffold").notices)
    assert "extra: scaffold_change" in scores


def test_the_training_loss_stays_at_the_client() -> None:
    for text in (PLAIN, 'dp_fedavg(epsilon=8.0, adaptive=False, noise_at="client") + fedprox'):
        experiment = trained(text, rounds=1)
        assert not experiment.backend.losses_of_round
        assert "training loss" not in {row.what for row in departures(experiment.method, experiment.settings)}


@pytest.mark.parametrize("compression", ["topk(share=0.1)", "quantise(bits=8)"])
def test_compression_after_the_clip_needs_noise_before_it(compression: str) -> None:
    with pytest.raises(JoinError, match=f"{compression.split('(')[0]} changes updates after dp_fedavg has clipped them"):
        built(f"{PLAIN} + {compression}")
    assert built(f'dp_fedavg(epsilon=8.0, adaptive=False, noise_at="client") + {compression}').method.uploads[0].stage == "clip"  # type: ignore[attr-defined]


def test_statistics_are_covered_for_clients_and_counters_are_not() -> None:
    experiment = built(PLAIN)
    rows = {row.what: row for row in departures(experiment.method, experiment.settings, experiment.bench.plan)}
    assert rows["entries: norm_stat"].covered and rows["entries: weight"].covered
    assert not rows["entries: norm_count"].covered
