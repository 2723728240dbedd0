"""Server optimizers, SCAFFOLD, FedNova, robust reducers and compressed uploads: formulas, identities, and what travels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import JoinError, OptionError, SettingError, SharingError
from polyfed.experiment import Experiment
from polyfed.method import SLOTS, parse
from polyfed.methods.fednova import effective_steps, local_steps
from polyfed.methods.krum import Krum, squared_distances
from polyfed.methods.median import Median
from polyfed.methods.quantise import Quantise, packed, unpacked
from polyfed.methods.topk import LargestChanges
from polyfed.methods.trimmed_mean import TrimmedMean, cut_at_each_end
from polyfed.result import Result
from polyfed.seeds import generator
from polyfed.settings import Settings
from polyfed.testing import TinyNet, check_method, tiny_federation
from watching import messages

State = dict[str, Tensor]
PARAMETERS = tuple(name for name, _ in TinyNet().named_parameters())
EQUAL = {"a": 8, "b": 8, "c": 8}


def built(method: str, sizes: dict[str, int] | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    return Experiment(Settings(method=method, **values), tiny_federation(sizes), model=TinyNet())


def trained(method: str, sizes: dict[str, int] | None = None, **changes: Any) -> Experiment:
    experiment = built(method, sizes, **changes)
    experiment.train()
    return experiment


def digest_of(method: str, sizes: dict[str, int] | None = None, **changes: Any) -> str:
    return Result(trained(method, sizes, **changes), []).digest


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def test_neutral_settings_fill_no_slot_and_are_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg")
    for text in ("fedavgm(momentum=0.0)", "trimmed_mean(share=0.0)", "quantise(bits=32)", "topk(share=1.0)"):
        atom = parse(text).atoms[-1]
        assert not any(atom.fills(slot) for slot in SLOTS), text
        assert digest_of(text) == plain, text
    assert digest_of("krum(keep=3)") == plain
    for text in ("fedavgm", "fedadam", "scaffold", "fednova", "median", "trimmed_mean", "krum", "quantise", "topk"):
        assert digest_of(text) != plain, text


# ---------------------------------------------------------------------------------------------------- server optimizers
def stepped(method: str, steps: int = 3) -> tuple[list[State], list[State]]:
    """Made-up aggregates, and the server's states before and after each."""
    experiment = built(method)
    server, stream = experiment.server, torch.Generator().manual_seed(1)
    states, aggregates = [dict(server.state)], []
    for number in range(1, steps + 1):
        server.begin(number, 0)
        made = {
            n: v + 0.01 * torch.randn(v.shape, generator=stream) if v.is_floating_point() else v + 1 for n, v in states[-1].items()
        }
        server.state = server.state | experiment.method.server_step(server, made)  # type: ignore[misc]
        aggregates.append(made)
        states.append(dict(server.state))
    return states, aggregates


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("fedavgm(momentum=0.7, lr=0.5)", lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.7)),
        (
            "fedadagrad(lr=0.02, tau=0.003)",
            lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.003**2, eps=0.003),
        ),
    ],
)
def test_server_steps_are_those_of_torch(method: str, make: Any) -> None:
    states, aggregates = stepped(method)
    parameters = {name: nn.Parameter(states[0][name].clone()) for name in PARAMETERS}
    optimizer = make(parameters.values())
    for after, aggregate in zip(states[1:], aggregates, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = parameter.detach() - aggregate[name]
        optimizer.step()
        assert_near(after, {name: parameter.detach() for name, parameter in parameters.items()})
        plain = [name for name in after if name not in PARAMETERS]
        assert len(plain) == 6 and all(torch.equal(after[name], aggregate[name]) for name in plain)


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_adam_and_yogi_follow_the_papers_recurrence(method: str) -> None:
    states, aggregates = stepped(f"{method}(lr=0.03, beta1=0.8, beta2=0.95, tau=0.002)")
    for name in PARAMETERS:
        w = states[0][name].double().numpy()
        m, v = np.zeros_like(w), np.full_like(w, 0.002**2)
        for after, aggregate in zip(states[1:], aggregates, strict=True):
            delta = aggregate[name].double().numpy() - w
            m = 0.8 * m + 0.2 * delta
            v = 0.95 * v + 0.05 * delta**2 if method == "fedadam" else v - 0.05 * delta**2 * np.sign(v - delta**2)
            w = w + 0.03 * m / (np.sqrt(v) + 0.002)
            np.testing.assert_allclose(after[name].numpy(), w, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "text",
    [
        "fedadam(lr=0.002, beta1=0.0, beta2=1.0, tau=0.001)",
        "fedyogi(lr=0.002, beta1=0.0, beta2=1.0, tau=0.001)",
        "fedadagrad(lr=2000.0, tau=1000.0)",
    ],
)
def test_adaptive_steps_that_do_not_adapt_are_fedavg(text: str) -> None:
    assert_near(trained(text).server.state, trained("fedavg").server.state)


def test_only_what_is_sent_and_uploaded_is_stepped() -> None:
    seen = set()
    for text in ("fedavgm + silobn", "fedavgm + fedbn", "fedavgm + perxan"):
        experiment = trained(text)
        seen.add(len(experiment.server.memory["fedavgm"]))
        travels = experiment.bench.plan.at(1).travels
        assert all(travels[name].up and travels[name].down for name in experiment.server.memory["fedavgm"])
    assert seen == {9, 5, 11}  # perxan: 5 others, and scale, shift and score of two instance sides
    with pytest.raises(JoinError, match="local holds its own rounds"):
        built("local + fedavgm")
    with pytest.raises(JoinError, match="server step"):
        parse("fedavgm + fedadam")


# --------------------------------------------------------------------------------------------------- SCAFFOLD and FedNova
def local_run(state: State, experiment: Experiment, client: str, number: int, correction: State) -> tuple[State, State, int]:
    """Plain SGD by hand: the state after it, the mean raw gradient, and the number of steps."""
    model, train = TinyNet(), {c.id: c.train for c in experiment.federation.clients}[client]
    model.load_state_dict(state)
    chunks = list(torch.randperm(len(train), generator=generator(0, "client", number, client)).split(4))
    if len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for chunk in chunks:
        x, y = train.batch(chunk)
        loss = nn.functional.cross_entropy(model(experiment.bench.preparation.for_testing(x)), y)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                total[name] += p.grad
                p -= 0.05 * (p.grad + correction.get(name, 0.0))
    return copy.deepcopy(model.state_dict()), {name: value / len(chunks) for name, value in total.items()}, len(chunks)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_scaffold_by_hand_with_mean_gradients(weights: str) -> None:
    """Under plain SGD the new control variate of option II is the mean of the round's raw gradients."""
    experiment = trained("scaffold", weights=weights, rounds=3)
    sizes = {"big": 13, "middle": 8, "small": 5} if weights == "samples" else dict.fromkeys(("big", "middle", "small"), 1)
    share = {client: size / sum(sizes.values()) for client, size in sizes.items()}
    state, own = dict(experiment.bench.initial), {client: {n: torch.zeros(()) for n in PARAMETERS} for client in share}
    for number in (1, 2, 3):
        control = {n: sum((share[k] * own[k][n] for k in share), torch.zeros(())) for n in PARAMETERS}
        runs = {k: local_run(state, experiment, k, number, {n: control[n] - own[k][n] for n in PARAMETERS}) for k in share}
        own = {k: run[1] for k, run in runs.items()}
        floats = [name for name in state if state[name].is_floating_point()]
        state = state | {n: sum((share[k] * runs[k][0][n] for k in share), torch.zeros(())) for n in floats}
    assert_near(experiment.server.state, {name: state[name] for name in floats}, 1e-5)
    for client, expected in own.items():
        assert_near(experiment.delivery.kept[client].memory["scaffold"], expected, 1e-4)
    mean = {n: sum((share[k] * own[k][n] for k in share), torch.zeros(())) for n in PARAMETERS}
    assert_near(experiment.server.memory["scaffold"], mean, 1e-4)


def test_the_first_round_of_scaffold_is_fedavg_to_the_bit_and_what_travels_is_counted() -> None:
    first, plain = trained("scaffold", rounds=1), trained("fedavg", rounds=1)
    assert all(torch.equal(first.server.state[name], value) for name, value in plain.server.state.items())
    size = 4 * sum(p.numel() for p in TinyNet().parameters())
    assert first.ledger.total("up") == plain.ledger.total("up") + 3 * size
    assert first.ledger.total("down") == plain.ledger.total("down")
    second = trained("scaffold")
    assert second.ledger.bytes["up"]["training"]["extra"] == 6 * size
    assert second.ledger.bytes["down"]["training"]["extra"] == 3 * size


def test_scaffold_keeps_absent_clients_and_local_entries_out() -> None:
    experiment = trained("fedbn + scaffold + agc", rounds=1, clients_per_round=2)
    assert len(experiment.delivery.kept) == 2
    own = {client: kept.memory["scaffold"] for client, kept in experiment.delivery.kept.items()}
    sizes = {"big": 13, "middle": 8, "small": 5}
    mean = {n: sum((sizes[k] / 26 * own[k][n] for k in own), torch.zeros(())) for n in next(iter(own.values()))}
    assert set(mean) == {"stem.0.weight", "branch.0.weight", "branch.0.bias", "head.weight", "head.bias"}
    assert_near(experiment.server.memory["scaffold"], mean)


def test_scaffold_refuses_what_hides_gradients() -> None:
    with pytest.raises(SettingError, match="--optimizer sgd"):
        built("scaffold", optimizer="adam")
    with pytest.raises(JoinError, match="carried-over momentum"):
        built('scaffold + momentum(keep="local")', momentum=0.9)


def test_server_lr_of_scaffold_scales_the_step() -> None:
    half, whole = trained("scaffold(server_lr=0.5)", rounds=1), trained("scaffold", rounds=1)
    start = half.bench.initial
    assert_near(half.server.state, {n: (start[n] + whole.server.state[n]) / 2 for n in PARAMETERS})
    assert torch.equal(half.server.state["stem.1.running_mean"], whole.server.state["stem.1.running_mean"])


def test_effective_steps_count_what_momentum_sets_in_motion() -> None:
    for m in (0.0, 0.5, 0.9):
        counter = total = 0.0
        for steps in range(1, 8):
            counter = m * counter + 1
            total += counter
            assert effective_steps(steps, Settings(momentum=m)) == pytest.approx(total)
    assert effective_steps(5, Settings(optimizer="adam")) == 5


def test_fednova_by_hand() -> None:
    experiment = trained("fednova", rounds=1)
    start = dict(experiment.bench.initial)
    share = {"big": 13 / 26, "middle": 8 / 26, "small": 5 / 26}
    runs = {client: local_run(start, experiment, client, 1, {}) for client in share}
    assert {client: run[2] for client, run in runs.items()} == {"big": 3, "middle": 2, "small": 1}
    effective = sum(share[k] * runs[k][2] for k in share)
    for name in PARAMETERS:
        direction = sum((share[k] * (runs[k][0][name] - start[name]) / runs[k][2] for k in share), torch.zeros(()))
        assert_near(experiment.server.state, {name: start[name] + effective * direction}, 2e-6)
    plain = trained("fedavg", rounds=1).server.state
    assert all(torch.equal(experiment.server.state[name], value) for name, value in plain.items() if name not in PARAMETERS)
    assert experiment.ledger.bytes["up"]["training"]["extra"] == 3 * 8


def test_fednova_sends_the_reference_down_and_the_normalised_change_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    start = trained("fedavg", rounds=1).bench.initial
    plain = {reply.client: reply.entries for _, reply in seen}
    seen.clear()
    trained("fednova", rounds=1)
    steps = {"big": 3, "middle": 2, "small": 1}
    assert [reply.client for _, reply in seen] == list(steps)
    for ask, reply in seen:
        down, own = ask.payloads[reply.client], steps[reply.client]
        assert down.extras == {"fednova_reference": 4} and reply.extras == {"fednova_steps": own}
        assert set(down.entries) == set(reply.entries) == set(start)
        assert all(torch.equal(down.entries[name], value) for name, value in start.items())
        for name, value in plain[reply.client].items():
            if name in PARAMETERS:
                torch.testing.assert_close(reply.entries[name], start[name] + (value - start[name]) * 4 / own)
            else:
                assert torch.equal(reply.entries[name], value)


def test_fednova_with_equal_steps_is_fedavg_to_the_bit() -> None:
    assert digest_state("fednova", EQUAL, momentum=0.9) == digest_state("fedavg", EQUAL, momentum=0.9)
    assert digest_state("fednova", local_steps=3) == digest_state("fedavg", local_steps=3)
    assert digest_state("fednova + fedbn", EQUAL) == digest_state("fedbn", EQUAL)


def digest_state(method: str, sizes: dict[str, int] | None = None, **changes: Any) -> list[bytes]:
    state = trained(method, sizes, **changes).server.state
    return [state[name].numpy().tobytes() for name in sorted(state)]


def test_steps_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.client import Client

    made: dict[str, int] = {}
    counted: dict[str, int] = {}
    forward = Client.forward

    def count(self: Client, index: int, x: Tensor, y: Tensor) -> Any:
        made[self.id], counted[self.id] = index + 1, local_steps(self)
        return forward(self, index, x, y)

    monkeypatch.setattr(Client, "forward", count)
    for changes in ({"local_epochs": 2}, {"local_epochs": 3, "last_batch": "drop"}, {"local_steps": 5}):
        trained("fedavg", rounds=1, **changes)
        assert made == counted and len(made) == 3


# --------------------------------------------------------------------------------------------------------------- reducers
def made_up(clients: int, seed: int = 0) -> list[State]:
    stream = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(4, 3, generator=stream), "n": torch.tensor(k)} for k in range(clients)]


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_median_is_numpys(clients: int) -> None:
    sent = made_up(clients)
    found = Median().combine(sent, [float(k + 1) for k in range(clients)], {})
    np.testing.assert_allclose(found["w"], np.median(np.stack([s["w"].numpy() for s in sent]), axis=0), rtol=1e-6)
    assert torch.equal(found["n"], torch.tensor(clients - 1))


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "krum"])
def test_of_a_single_client_every_reducer_is_fedavg_to_the_bit(text: str) -> None:
    assert digest_of(text, {"only": 12}) == digest_of("fedavg", {"only": 12})


def test_the_trimmed_mean_is_scipys_and_weighted_by_hand() -> None:
    trim_mean = pytest.importorskip("scipy.stats").trim_mean
    sent = made_up(10)
    found = TrimmedMean(0.2).combine(sent, [1.0] * 10, {})
    np.testing.assert_allclose(found["w"], trim_mean(np.stack([s["w"].numpy() for s in sent]), 0.2, axis=0), rtol=1e-5)
    rows = [{"w": torch.tensor([v])} for v in (9.0, 1.0, 4.0, -7.0)]
    assert TrimmedMean(0.25).combine(rows, [1.0, 3.0, 1.0, 5.0], {})["w"].item() == pytest.approx((3 * 1 + 1 * 4) / 4)
    assert [cut_at_each_end(0.1, count) for count in (1, 2, 3, 10, 30, 31)] == [0, 0, 1, 1, 3, 4]


def test_krum_scores_by_hand() -> None:
    places = [0.0, 1.0, 3.0, 10.0, 100.0]
    sent = [{"w": torch.tensor([p]), "s": torch.tensor([0.0, 2 * p]), "n": torch.tensor(k)} for k, p in enumerate(places)]
    # 5 - 1 - 2 = 2 neighbours; squared distances are 5 times those on the line: 0: 1+9, 1: 1+4, 3: 4+9, 10: 49+81, 100: far
    rows = torch.tensor(places, dtype=torch.float64)
    scores = Krum(1, 1).scores(5 * (rows[:, None] - rows).square())
    assert scores.tolist() == pytest.approx([50, 25, 65, 650, 5 * (8100 + 97**2)])
    found = Krum(1, 1).combine(sent, [1.0] * 5, {})
    assert {name: value.tolist() for name, value in found.items()} == {"w": [1.0], "s": [0.0, 2.0], "n": 1}
    found = Krum(1, 3).combine(sent, [1.0, 2.0, 1.0, 9.0, 9.0], {})
    assert found["w"].item() == pytest.approx(5 / 4) and found["n"].item() == 2


def test_krum_adds_squared_distances_over_all_entries() -> None:
    sent = [entries | {"s": torch.randn(5, generator=torch.Generator().manual_seed(k))} for k, entries in enumerate(made_up(4))]
    rows = np.stack([np.concatenate((entries["w"].numpy().ravel(), entries["s"].numpy())) for entries in sent]).astype(float)
    expected = ((rows[:, None] - rows) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(sent), expected, rtol=1e-12)
    # 5 - 1 - 2 = 2 neighbours. The last: 5 + 5 squared, 4.47 plain; the second: 1 + 10 squared, 4.16 plain.
    places = [(0.0, 0.0), (1.0, 0.0), (5.0, 0.0), (2.0, 3.0), (4.0, 2.0)]
    sent = [{"w": torch.tensor([w]), "s": torch.tensor([[s]])} for w, s in places]
    assert Krum(1, 1).chosen(sent) == [4]


def replies_with_a_liar(method: str, liar: str = "c") -> tuple[Experiment, dict[str, State]]:
    """One round in which one client sends nonsense."""
    experiment = built(method, {"a": 8, "b": 9, "c": 10, "d": 11, "e": 12}, rounds=1)
    reply, sent = experiment.delivery.taken, {}

    def lie(ask: Any, outcome: Any) -> Any:
        made = reply(ask, outcome)
        if outcome.client == liar:
            for value in made.entries.values():  # type: ignore[union-attr]
                value.add_(1000)
        sent[outcome.client] = dict(made.entries)  # type: ignore[union-attr]
        return made

    experiment.delivery.taken = lie  # type: ignore[method-assign]
    experiment.train()
    return experiment, sent


def test_robust_reducers_withstand_a_liar() -> None:
    experiment, sent = replies_with_a_liar("krum")
    state = experiment.server.state
    chosen = [client for client, entries in sent.items() if all(torch.equal(state[n], v) for n, v in entries.items())]
    assert len(chosen) == 1 and chosen != ["c"]
    for text in ("median", "trimmed_mean", "median + fedbn"):
        experiment, sent = replies_with_a_liar(text)
        assert all(bool((value.abs() < 50).all()) for value in experiment.server.state.values() if value.is_floating_point()), text
    experiment, _ = replies_with_a_liar("fedavg")
    assert bool((experiment.server.state["head.bias"] > 100).all())


def test_reducers_upload_what_fedavg_uploads_and_say_what_they_cannot() -> None:
    plain = trained("fedavg").ledger.bytes
    for text in ("median", "trimmed_mean", "krum"):
        assert trained(text).ledger.bytes == plain, text
    assert any("5 or more" in note for note in built("krum").notices)
    assert not any("krum" in note for note in built("krum(faulty=0)").notices)
    with pytest.raises(SharingError, match="how it is reduced"):
        built("median + krum")
    experiment = trained('krum + momentum(keep="global")', momentum=0.9)
    assert experiment.server.phase.travels["optimizer/momentum_buffer/head.bias"].reduce == Krum(1, 1)


# ------------------------------------------------------------------------------------------------------ compressed uploads
def test_codes_are_packed_and_unpacked() -> None:
    for bits in (1, 2, 4, 8):
        codes = torch.randint(0, 2**bits, (13,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
        assert len(packed(codes, bits)) == -(-13 * bits // 8)
        assert torch.equal(unpacked(packed(codes, bits), bits)[:13], codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantised_values_are_numpys_levels(dtype: torch.dtype) -> None:
    change = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=dtype)
    entry = type(built("fedavg").bench.plan.entries["head.bias"])("x", "weight", "linear", (7, 5), dtype, True)
    stream, array = torch.Generator().manual_seed(0), change.double().numpy()
    for bits in (2, 8):
        scale = (array.max() - array.min()) / (2**bits - 1)
        nearest = array.min() + scale * np.floor((array - array.min()) / scale + 0.5)
        plain = Quantise(bits, False)
        np.testing.assert_allclose(plain.decoded(plain.encoded(change, stream), entry), nearest, rtol=1e-4, atol=1e-6)
        noisy = Quantise(bits, True)
        many = torch.stack([noisy.decoded(noisy.encoded(change, stream), entry) for _ in range(400)]).double().numpy()
        assert np.abs(many - array).max() <= scale * 1.001
        assert np.abs(many.mean(0) - array).max() < 5 * scale / 2 / np.sqrt(400)
        assert len(plain.encoded(change, stream)) == plain.size(entry)
    constant = torch.full((7, 5), 0.25, dtype=dtype)
    assert torch.equal(plain.decoded(plain.encoded(constant, stream), entry), constant)


SIZES = tuple(p.numel() for p in TinyNet().parameters())
DENSE = 4 * 4 * 8 + 2 * 8


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("quantise", sum(8 + n for n in SIZES)),
        ("quantise(bits=4)", sum(8 + -(-n // 2) for n in SIZES)),
        ("topk", sum(8 * -(-n // 100) for n in SIZES)),
        ("topk(share=0.25, memory=False)", sum(min(8 * -(-n // 4), 4 * n) for n in SIZES)),
    ],
)
def test_the_bytes_that_travel_are_counted(text: str, size: int) -> None:
    experiment, plain = trained(text), trained("fedavg")
    assert experiment.ledger.total("up") == 2 * 3 * (size + DENSE)
    assert "extra" not in experiment.ledger.bytes["up"]["training"]
    assert experiment.ledger.total("down") == plain.ledger.total("down")
    counters = [name for name in plain.server.state if "num_batches" in name]
    assert all(torch.equal(experiment.server.state[name], plain.server.state[name]) for name in counters)


def test_compressed_training_stays_near() -> None:
    plain = trained("fedavg", rounds=1).server.state
    near = trained("quantise", rounds=1).server.state
    moved = {name: (plain[name] - built("fedavg").bench.initial[name]).abs().max() for name in PARAMETERS}
    assert all(bool((near[name] - plain[name]).abs().max() <= 0.02 * moved[name]) for name in PARAMETERS)
    assert all(torch.equal(near[name], value) for name, value in plain.items() if name not in PARAMETERS)


def test_topk_sends_the_largest_changes_and_keeps_the_rest() -> None:
    change = torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3, 0.0, 0.05, 0.4])
    entry = type(built("fedavg").bench.plan.entries["head.bias"])("x", "weight", "linear", (8,), torch.float32, True)
    part = LargestChanges(0.25, True)
    sent, left = part.encoded(change)
    positions, values = part.decoded(sent, entry)
    assert positions.tolist() == [1, 3] and values.tolist() == [-3.0, 2.0] and sent.dtype == torch.uint8 and len(sent) == 16
    assert torch.equal(left.index_add(0, positions, values), change)
    assert part.count(30) == 8 and LargestChanges(0.1, True).count(30) == 3


def test_what_topk_did_not_send_is_added_the_next_time() -> None:
    """With one client, sent changes and memory together are all its changes."""
    experiment = built("topk", {"only": 8}, rounds=1)
    experiment.train()
    start, left = experiment.bench.initial, experiment.delivery.kept["only"].memory["topk"]
    whole = trained("fedavg", {"only": 8}, rounds=1).server.state
    for name in PARAMETERS:
        moved = experiment.server.state[name] - start[name]
        assert int((moved != 0).sum()) <= -(-moved.numel() // 100)
        assert_near({name: moved + left[name].reshape(moved.shape)}, {name: whole[name] - start[name]})
    assert not trained("topk(memory=False)").delivery.kept


def test_a_reply_that_cannot_be_decoded_is_rejected() -> None:
    for text, spoil in (("quantise", lambda v: v[:-1]), ("topk", lambda v: v * 0 + 255)):
        experiment = built(text, min_share=0.5)
        reply = experiment.delivery.taken

        def broken(ask: Any, outcome: Any, reply: Any = reply, spoil: Any = spoil) -> Any:
            made = reply(ask, outcome)
            if outcome.client == "small":
                made.payload.entries["head.weight"] = spoil(made.entries["head.weight"])
            return made

        experiment.delivery.taken = broken  # type: ignore[method-assign]
        experiment.train()
        assert "head.weight" in experiment.server.rejected["small"]


def test_compression_refuses_what_it_cannot_undo() -> None:
    with pytest.raises(JoinError, match="stage 'compress'"):
        parse("quantise + topk")
    with pytest.raises(JoinError, match="pfedhn"):
        built("pfedhn + quantise")


@pytest.mark.parametrize(
    "text",
    [
        "fedbn + quantise(bits=4) + fedadam",
        "silobn + topk(share=0.1) + fednova",
        "scaffold(server_lr=0.7) + fedbn + median",
        "fixbn + krum(keep=2)",
    ],
)
def test_compositions_keep_the_contract(text: str) -> None:
    check_method(text)


@pytest.mark.parametrize(
    "text",
    ["fedavgm(momentum=1.0)", "fedadam(lr=0.0)", "fedyogi(beta1=1.0)", "fedadagrad(tau=0.0)", "scaffold(server_lr=-1.0)"]
    + ["trimmed_mean(share=0.5)", "krum(keep=0)", "quantise(bits=3)", "topk(share=0.0)"],
)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=text.split("(")[0]):
        parse(text)
