"""hFedF and pFedHN against numbers worked out another way: autograd on the composed function, naive full gradients, numpy recurrences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyfed.core.entries import entries_of
from polyfed.core.method import Method, parse
from polyfed.core.reducers import CollectedReducer
from polyfed.core.rounds import Payload, Reply, Request, run_exchange
from polyfed.core.seeds import generator
from polyfed.core.sharing import head, reduce_with
from polyfed.errors import DataError, JoinError, ModelError, OptionError, TooFewReplies
from polyfed.methods._shared import hypernetwork
from polyfed.methods._shared.generated_weights import selected
from polyfed.methods._shared.hypernetwork import Generator, Hypernetwork, Pull, alignment, average_with, parameter_count
from polyfed.methods.hfedf import pixels, standardised
from polyfed.models import models
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, check_method, tiny_federation

PLAIN = 'server_optimizer="sgd", server_momentum=0.0, server_weight_decay=0.0, server_clip=0.0'
SHAPES = {"first.weight": (5, 4), "first.bias": (5,), "last.weight": (3, 5), "last.bias": (3,)}


class NormFree(nn.Module):
    """Nothing but weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def experiment(method: str | Method, federation: Any = None, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    return Experiment(Settings(**values), federation or tiny_federation(), method, model or TinyNet())


def trained(method: str | Method, *args: Any, **changes: Any) -> Experiment:
    made = experiment(method, *args, **changes)
    made.train()
    return made


def maker_of(made: Experiment) -> Generator:
    return made.method.round.generation.generator(made.server)  # type: ignore[no-any-return, union-attr]


def network(clients: int = 4, dimension: int = 2, width: int = 7) -> Hypernetwork:
    torch.manual_seed(1)
    return Hypernetwork(clients, SHAPES, dimension, width).double()


def random_deltas(clients: int, seed: int = 0) -> list[dict[str, Tensor]]:
    stream = torch.Generator().manual_seed(seed)
    shared = {name: torch.randn(shape, generator=stream, dtype=torch.float64) for name, shape in SHAPES.items()}
    return [
        {name: value + i * torch.randn(value.shape, generator=stream, dtype=torch.float64) for name, value in shared.items()}
        for i in range(clients)
    ]


def full_gradient(net: Hypernetwork, client: int, deltas: Mapping[str, Tensor]) -> Tensor:
    """J^T delta by autograd through the whole hypernetwork, flattened."""
    made = net(client)
    scalar = sum((made[name] * deltas[name]).sum() for name in made)
    gradients = torch.autograd.grad(scalar, list(net.parameters()))  # type: ignore[arg-type]
    return torch.cat([g.reshape(-1) for g in gradients])


def written_gradient(net: Hypernetwork) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


# --- The gradient through the hypernetwork. ---


def test_the_vector_jacobian_product_is_autograds_on_the_composed_function() -> None:
    """One plain SGD step at the client: delta / lr is its gradient, so the product is the gradient of loss(h(nu))."""
    net, lr = network(), 0.3
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 5))
    model.add_module("act", nn.Tanh())
    model.add_module("last", nn.Linear(5, 3))
    model.double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = nn.functional.cross_entropy(functional_call(model, net(2), (x,)), y)
    expected = torch.autograd.grad(loss, list(net.parameters()))

    sent = {name: value.detach() for name, value in net(2).items()}
    model.load_state_dict(sent)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    deltas = {name: sent[name] - value for name, value in model.state_dict().items()}
    net.write_gradient([net.pull(2, deltas)], torch.ones(1, dtype=torch.float64))
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, lr * gradient, rtol=1e-10, atol=1e-12)
    assert net.embedding.weight.grad is not None
    assert net.embedding.weight.grad[2].abs().sum() > 0 and net.embedding.weight.grad[[0, 1, 3]].abs().sum() == 0


def test_a_round_moves_the_hypernetwork_down_the_composed_loss() -> None:
    """Through the loop, on a model with batch norm: parameters - server_lr * lr * gradient of loss(h(nu))."""
    federation = tiny_federation({"only": 8})
    made = experiment(f"pfedhn({PLAIN}, server_lr=0.5)", federation, rounds=1, local_steps=1, batch_size=8)
    net = copy.deepcopy(maker_of(made).network)
    x, y = federation.clients[0].train.batch(torch.randperm(8, generator=generator(0, "client", 1, "only")))
    x = federation.preparation.for_testing(x)
    torch.manual_seed(3)
    loss = nn.functional.cross_entropy(functional_call(TinyNet().train(), net(0), (x,)), y)
    expected = torch.autograd.grad(loss, list(net.parameters()))
    made.train()
    for after, before, gradient in zip(maker_of(made).network.parameters(), net.parameters(), expected, strict=True):
        torch.testing.assert_close(after, before - 0.5 * 0.05 * gradient, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        again = nn.functional.cross_entropy(functional_call(TinyNet().train(), maker_of(made).network(0), (x,)), y)
    assert again < loss, "a small step of the server must lower the client's loss; it rises when the sign is wrong"


def test_weights_and_combined_gradient_are_the_naive_ones() -> None:
    net, deltas = network(), random_deltas(4)
    full = torch.stack([full_gradient(net, i, delta) for i, delta in enumerate(deltas)])
    mean = full.mean(dim=0)
    cosines = torch.stack([g @ mean / (g.norm() * mean.norm()) for g in full])
    expected = cosines.exp() / cosines.exp().sum()
    pulls = [net.pull(i, delta) for i, delta in enumerate(deltas)]
    torch.testing.assert_close(net.inner_products(pulls), full @ full.T, rtol=1e-10, atol=1e-10)
    weights = alignment(net.inner_products(pulls))
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
    assert weights.argmax() == cosines.argmax() and weights.max() - weights.min() > 0.01
    net.write_gradient(pulls, weights)
    torch.testing.assert_close(written_gradient(net), expected @ full, rtol=1e-10, atol=1e-10)


def test_fixed_embeddings_are_no_part_of_the_gradient() -> None:
    net, deltas = network(), random_deltas(3)
    rows = net.embedding.weight.numel()
    full = torch.stack([full_gradient(net, i, delta)[rows:] for i, delta in enumerate(deltas)])
    net.embedding.weight.requires_grad_(False)
    pulls = [net.pull(i, delta) for i, delta in enumerate(deltas)]
    torch.testing.assert_close(net.inner_products(pulls), full @ full.T, rtol=1e-10, atol=1e-10)
    net.write_gradient(pulls, torch.tensor([0.2, 0.3, 0.5]))
    assert net.embedding.weight.grad is None


def test_no_clients_full_gradient_is_held() -> None:
    """What is kept of a client are its deltas and two small vectors, without a graph."""
    net = Hypernetwork(3, {"w": (100, 100)}, 1, 50)
    pull: Pull = net.pull(0, {"w": torch.ones(100, 100)})
    tensors = [*pull.deltas, pull.z, pull.trunk, pull.row]
    assert sum(t.numel() for t in tensors) == 10_000 + 50 + 7_750 + 1
    assert sum(p.numel() for p in net.parameters()) > 50 * 10_000
    assert not any(t.requires_grad for t in tensors)


# --- GradAlign. ---


def test_alignment_of_one_and_of_equal_gradients() -> None:
    assert torch.equal(alignment(torch.tensor([[4.0]])), torch.tensor([1.0]))
    assert torch.equal(alignment(torch.full((4, 4), 2.5, dtype=torch.float64)), torch.full((4,), 0.25, dtype=torch.float64))
    assert torch.equal(alignment(torch.zeros(2, 2)), torch.tensor([0.5, 0.5]))


def test_alignment_by_hand_permutes_and_counts_zero_gradients_as_orthogonal() -> None:
    g = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    cosines = np.array([1 / np.sqrt(2), 1 / np.sqrt(2), 1.0, 0.0])
    expected = np.exp(cosines) / np.exp(cosines).sum()
    products = torch.from_numpy(g @ g.T)
    np.testing.assert_allclose(alignment(products).numpy(), expected, rtol=1e-12)
    order = torch.tensor([2, 0, 3, 1])
    np.testing.assert_allclose(alignment(products[order][:, order]).numpy(), expected[order.numpy()], rtol=1e-12)
    assert expected.max() / expected.min() <= np.exp(2)


def test_without_alignment_clients_weigh_the_same() -> None:
    net = network()
    maker = Generator(net, torch.optim.SGD(net.parameters(), lr=0.0), ["a", "b", "c", "d"])
    deltas = dict(zip("abcd", random_deltas(4), strict=True))
    assert maker.learn(deltas, align=False).tolist() == [0.25] * 4
    assert len(set(maker.learn(deltas, align=True).tolist())) == 4


# --- Moving average. ---


def test_the_moving_average_follows_the_papers_recurrence() -> None:
    """ema <- live in round W; later ema <- a live + (1 - a) ema and live <- ema, with Adam's moments untouched."""
    alpha, warmup = 0.75, 3
    torch.manual_seed(0)
    shapes = {"w": (4, 3)}
    smooth = Generator(made := Hypernetwork(2, shapes, 1, 5), torch.optim.Adam(made.parameters(), lr=0.05), ["a", "b"])
    other = Generator(twin := Hypernetwork(2, shapes, 1, 5), torch.optim.Adam(twin.parameters(), lr=0.05), ["a", "b"])
    ema: list[np.ndarray[Any, Any]] = []
    for number in range(1, 8):
        stream = torch.Generator().manual_seed(number)
        deltas = {client: {"w": torch.randn(4, 3, generator=stream)} for client in ("a", "b")}
        other.load_state_dict(copy.deepcopy(smooth.state_dict()))
        other.learn(deltas, align=True)
        live = [p.detach().numpy().copy() for p in other.network.parameters()]
        if number == warmup:
            ema = live
        elif number > warmup:
            live = ema = [alpha * new + (1 - alpha) * old for new, old in zip(live, ema, strict=True)]
        smooth.learn(deltas, align=True, smoothing=alpha if number > warmup else None)
        for parameter, expected in zip(smooth.network.parameters(), live, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
        one, two = smooth.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        assert all(torch.equal(one[key]["exp_avg"], two[key]["exp_avg"]) for key in two)


def test_an_average_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([2.0, 4.0]))
    average_with([torch.tensor([0.0, 8.0])], [parameter], 0.75)
    assert torch.equal(parameter, torch.tensor([1.5, 5.0]))


def test_the_warm_up_round_and_the_switches() -> None:
    digests = {text: Result(trained(text, rounds=3), []).digest for text in ("hfedf", "hfedf(ema=False)", "hfedf(warmup=2)")}
    assert digests["hfedf"] == digests["hfedf(ema=False)"] != digests["hfedf(warmup=2)"]
    assert Result(trained("hfedf(warmup=2)", rounds=2), []).digest == Result(trained("hfedf(ema=False)", rounds=2), []).digest
    assert Result(trained("hfedf(gradalign=False)", rounds=3), []).digest != digests["hfedf"]


# --- pFedHN. ---


@pytest.mark.parametrize("server", ['server_optimizer="adam", server_clip=0.0', 'server_optimizer="sgd", server_clip=2.0'])
def test_joint_pfedhn_is_hfedf_without_alignment_and_average(server: str) -> None:
    same = f"{server}, server_lr=0.01, server_weight_decay=1e-4"
    joint = Result(trained(f'pfedhn(server_update="joint", {same})', rounds=3), []).digest
    assert joint == Result(trained(f"hfedf(gradalign=False, ema=False, {same})", rounds=3), []).digest
    assert joint != Result(trained(f"pfedhn({same})", rounds=3), []).digest


def test_with_one_client_sequential_and_joint_are_the_same() -> None:
    federation = tiny_federation({"only": 9})
    assert (
        Result(trained("pfedhn", federation), []).digest == Result(trained('pfedhn(server_update="joint")', federation), []).digest
    )


def test_sequential_clients_get_weights_made_after_the_step_before() -> None:
    made = experiment("pfedhn", rounds=1)
    start = {client: made.server.outgoing(client)["head.weight"].clone() for client in ("big", "middle", "small")}
    asked = watched(made)
    made.train()
    orders = [(client, payload) for ask, _ in asked for client, payload in ask.payloads.items()]
    assert len(orders) == 3
    fresh = [torch.equal(payload.entries["head.weight"], start[client]) for client, payload in orders]
    assert fresh == [True, False, False]


# --- Replies that do not come, or are wrong. ---


def broken(reply: Reply, name: str = "head.weight") -> Reply:
    return Reply(reply.client, Payload({**reply.entries, name: reply.entries[name] * float("nan")}), reply.samples)


def delivered(made: Experiment, spoil: frozenset[str] = frozenset(), lose: frozenset[str] = frozenset()) -> Any:
    def send_request(request: Request) -> Iterator[Reply]:
        for reply in made.backend(request):
            if reply.client not in lose:
                yield broken(reply) if reply.client in spoil else reply

    return send_request


@pytest.mark.parametrize("text", ["hfedf", "pfedhn"])
def test_bad_and_missing_replies_are_skipped(text: str) -> None:
    spoilt, lost = experiment(text), experiment(text)
    for made, how in ((spoilt, {"spoil": frozenset({"middle"})}), (lost, {"lose": frozenset({"middle"})})):
        made.server.start_round(1, 0)
        run_exchange(made.method.round(made.server), made.checked_sender(delivered(made, **how)))  # type: ignore[arg-type, misc]
    assert list(spoilt.server.rejected) == ["middle"] and not lost.server.rejected
    for one, two in zip(maker_of(spoilt).network.parameters(), maker_of(lost).network.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("text", ["hfedf", "pfedhn"])
def test_too_few_replies_leave_everything_as_it_was(text: str) -> None:
    made = trained(text, rounds=1)
    before = copy.deepcopy(made.server.memory_state())
    state = dict(made.server.state)
    made.server.start_round(2, 0)
    with pytest.raises(TooFewReplies, match="1 of 3"):
        run_exchange(made.method.round(made.server), made.checked_sender(delivered(made, lose=frozenset({"big", "small"}))))  # type: ignore[misc]
    assert torch_equal(before, made.server.memory_state())
    assert all(torch.equal(state[name], made.server.state[name]) for name in state)


def torch_equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(torch_equal(one[key], two[key]) for key in one)
    return bool(one == two)


# --- What travels. ---


def watched(made: Experiment) -> list[tuple[Request, list[Reply]]]:
    seen: list[tuple[Request, list[Reply]]] = []
    send_request = made.backend.__class__.__call__

    def watch(self: Any, request: Request) -> Iterator[Reply]:
        replies: list[Reply] = []
        seen.append((request, replies))
        for reply in send_request(self, request):
            replies.append(reply)
            yield reply

    made.backend.__class__ = type("Watched", (made.backend.__class__,), {"__call__": watch})
    return seen


@pytest.mark.parametrize("text", ["hfedf", "pfedhn", 'hfedf(embedding="random")'])
def test_only_model_entries_travel_and_embeddings_never(text: str) -> None:
    made = experiment(text)
    rows = [maker_of(made).network.embedding.weight.detach().clone()]
    seen = watched(made)
    made.train([lambda server: rows.append(maker_of(made).network.embedding.weight.detach().clone())])
    made.evaluate()
    weights = {name for name, entry in made.bench.plan.entries.items() if entry.trainable}
    embeddings = {float(value) for table in rows for value in table.reshape(-1)}
    assert {ask.what for ask, _ in seen} == {"train", "evaluate", "entries"}
    for ask, replies in seen:
        for payload in (*ask.payloads.values(), *(reply.payload for reply in replies)):
            if ask.what == "train":
                assert set(payload.entries) == weights and not payload.extras
            for value in payload.entries.values():
                assert not embeddings & set(value.reshape(-1).double().tolist())
            assert not any(isinstance(extra, Tensor) for extra in payload.extras.values())
    size = sum(entry.size for name, entry in made.bench.plan.entries.items() if name in weights)
    assert made.costs.total("down") == made.costs.total("up") == 2 * 3 * size


def test_statistics_stay_and_each_client_gets_its_own_weights() -> None:
    made = trained("hfedf")
    sent = {client: made.server.outgoing(client) for client in ("big", "middle", "small")}
    assert not any("running" in name or "num_batches" in name for name in sent["big"])
    assert not torch.equal(sent["big"]["head.weight"], sent["small"]["head.weight"])
    assert set(made.backend.client_states["small"].entries) == {
        n for n in TinyNet().state_dict() if "running" in n or "num_batches" in n
    }
    assert made.server.state["stem.1.running_mean"].abs().sum() == 0


@pytest.mark.parametrize("model", [TinyNet, NormFree])
def test_a_newcomer_is_scored_by_every_generated_model(model: type[nn.Module]) -> None:
    made = trained("hfedf", model=model())
    newcomer = made.exchange(made.method.newcomer(made.server))  # type: ignore[misc]
    assert newcomer.score == "mean_of_models" and len(newcomer.models) == 3
    rows = {row.domain: row for row in made.evaluate() if row.view == "unseen"}
    result = Result(made, [])
    x, y = made.federation.unseen["new"].batch(slice(None))
    x = made.federation.preparation.for_testing(x)
    with torch.no_grad():
        hits = [float((result.model_for(c.id)(x).argmax(1) == y).float().mean()) for c in made.federation.clients]
    assert rows["new"].numbers["accuracy"] == pytest.approx(sum(hits) / 3)


# --- Generating some entries, averaging the rest. ---


def test_what_is_not_generated_is_averaged() -> None:
    made = experiment('hfedf(generate="head")', rounds=1)
    seen = watched(made)
    made.train()
    ((ask, replies),) = seen
    body = [n for n, e in made.bench.plan.entries.items() if e.trainable and not n.startswith("head.")]
    assert list(maker_of(made).network.shapes) == ["head.weight", "head.bias"]
    for name in body:
        mean = sum(r.samples / 26 * r.entries[name].double() for r in replies)
        torch.testing.assert_close(made.server.state[name].double(), mean, rtol=1e-5, atol=1e-7)
        assert torch.equal(made.server.outgoing("big")[name], made.server.state[name])
    heads = [payload.entries["head.weight"] for payload in ask.payloads.values()]
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(ask.payloads["big"].entries["stem.0.weight"], ask.payloads["small"].entries["stem.0.weight"])


def test_stages_heads_and_patterns() -> None:
    resnet = models.build("resnet18", classes=7, input_shape=(3, 32, 32))
    entries = entries_of(resnet, "fc")
    last = selected(entries, "last_stage")
    assert {name.split(".")[0] for name in last} == {"layer4", "fc"} and len(last) == sum(
        n[:6] in ("layer4", "fc.wei", "fc.bia") for n in entries
    )
    assert selected(entries, "head") == ["fc.weight", "fc.bias"]
    assert set(selected(entries, "layer4.1.*, fc.*")) == {n for n in entries if n.startswith(("layer4.1.", "fc."))}
    cnn = models.build("hfedf_cnn", classes=7, input_shape=(3, 32, 32))
    assert selected(entries_of(cnn, "head"), "last_stage") == ["body.fc.weight", "body.fc.bias", "head.weight", "head.bias"]
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    assert selected(entries_of(plain, "2"), "last_stage") == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_what_cannot_be_generated_is_an_error() -> None:
    with pytest.raises(ModelError, match="matches no trainable entry"):
        experiment('hfedf(generate="nothing.*")')
    with pytest.raises(ModelError, match="matches no trainable entry"):
        experiment('hfedf(generate="stem.1.running_*")')


def test_reducing_what_is_generated_would_be_ignored() -> None:
    class Middle(CollectedReducer):
        def __hash__(self) -> int:
            return 1

    part = Method("middle", sharing=(reduce_with(head, Middle()),), standalone=False)
    with pytest.raises(JoinError, match="middle, which reduces it, would be ignored"):
        experiment(parse("hfedf") + part)
    with pytest.raises(JoinError, match="does not use weighting"):
        parse("hfedf") + Method("weighs", weighting=lambda server, reply: 1.0, standalone=False)


# --- The network and its size. ---


def test_the_size_is_that_of_the_papers_network() -> None:
    cnn = models.build("hfedf_cnn", classes=7, input_shape=(3, 32, 32))
    values = sum(p.numel() for p in cnn.parameters())
    assert values == 928_199
    assert parameter_count(3, values, 1, 50) == 3 + 7_750 + 51 * 928_199
    net = Hypernetwork(5, SHAPES, 2, 11)
    assert sum(p.numel() for p in net.parameters()) == parameter_count(5, 43, 2, 11)
    kinds = [type(layer).__name__ for layer in Hypernetwork(1, {"w": (2,)}, 1, 50).trunk]
    assert kinds == ["Linear", "LeakyReLU"] * 3 + ["Linear"]


@pytest.mark.parametrize(("clients", "dimension"), [(1, 1), (3, 1), (4, 2), (10, 3)])
def test_embeddings_have_a_quarter_of_the_clients_dimensions(clients: int, dimension: int) -> None:
    made = experiment("hfedf", tiny_federation({f"c{i}": 4 for i in range(clients)}))
    assert maker_of(made).network.embedding.weight.shape == (clients, dimension)
    wide = experiment("hfedf(embedding_dim=6)", tiny_federation({f"c{i}": 4 for i in range(clients)}))
    assert maker_of(wide).network.embedding.weight.shape == (clients, 6)


@pytest.mark.parametrize("method", ["hfedf", "pfedhn"])
def test_embeddings_are_drawn_as_far_apart_as_asked_for(method: str) -> None:
    whole, tenth, none = (maker_of(experiment(f"{method}(embedding_scale={scale})")).network for scale in (1.0, 0.1, 0.0))
    assert torch_equal(whole.state_dict(), maker_of(experiment(method)).network.state_dict())
    assert torch.equal(tenth.embedding.weight, 0.1 * whole.embedding.weight)
    assert torch_equal(tenth.trunk.state_dict(), whole.trunk.state_dict())
    assert torch_equal(none(0), none(1)) and not torch_equal(whole(0), whole(1))
    with pytest.raises(OptionError, match="embedding_scale must not be negative"):
        parse(f"{method}(embedding_scale=-0.1)")


def test_clients_with_near_embeddings_keep_nearly_one_model() -> None:
    def apart(scale: float) -> float:
        made = trained(f"hfedf(embedding_scale={scale}, server_lr=0.01)", rounds=4, lr=0.01)
        models = [torch.cat([v.flatten() for v in made.server.outgoing(c).values()]) for c in ("big", "middle", "small")]
        return float(torch.stack(models).std(dim=0).norm())

    assert 0 < apart(0.01) < 0.3 * apart(1.0)


def test_generated_tensors_start_near_the_models_own() -> None:
    made = experiment("hfedf")
    own = made.bench.initial
    strayed = {client: made.server.outgoing(client) for client in ("big", "middle", "small")}
    for name in ("stem.0.weight", "branch.0.weight"):
        apart = [float((sent[name] - own[name]).std(correction=0)) for sent in strayed.values()]
        assert np.mean(apart) == pytest.approx(0.1 * float(own[name].std(correction=0)), rel=1e-4)
        assert len({round(distance, 9) for distance in apart}) == 3
    assert all(torch.equal(sent["stem.1.weight"], torch.ones(8)) for sent in strayed.values())


def test_matched_tensors_start_with_the_spread_of_the_models_own() -> None:
    made, plain = experiment('hfedf(head_init="match")'), experiment('hfedf(head_init="default")')
    for client in ("big", "small"):
        sent = made.server.outgoing(client)
        for name in ("stem.0.weight", "branch.0.weight"):
            own = made.bench.initial[name]
            assert float(sent[name].std()) == pytest.approx(float(own.std()), rel=0.35)
        assert torch.equal(sent["stem.1.weight"], torch.ones(8)) and torch.equal(sent["stem.1.bias"], torch.zeros(8))
        assert not torch.allclose(plain.server.outgoing(client)["stem.1.weight"], torch.ones(8), atol=0.3)
    spreads = [float(made.server.outgoing(c)["stem.0.weight"].std(correction=0)) for c in ("big", "middle", "small")]
    assert np.mean(spreads) == pytest.approx(float(made.bench.initial["stem.0.weight"].std(correction=0)), rel=1e-4)


def test_heads_and_trunk_may_learn_at_rates_of_their_own() -> None:
    start = dict(maker_of(experiment("hfedf")).network.named_parameters())
    moved = {}
    for rate in (0.0, 0.1, 1.0):
        learnt = dict(maker_of(trained(f"hfedf(trunk_rate={rate}, server_weight_decay=0.0)", rounds=1)).network.named_parameters())
        moved[rate] = {name: float((learnt[name] - value).detach().abs().max()) for name, value in start.items()}

    def longest(rate: float, *parts: str) -> float:
        return max(length for name, length in moved[rate].items() if name.split(".")[0] in parts)

    for rate in moved:
        # A first step of Adam has the length of the rate, whatever the gradient.
        assert longest(rate, "heads") == pytest.approx(1e-3, rel=0.01)
        for part in ("trunk", "embedding"):
            assert longest(rate, part) == pytest.approx(rate * 1e-3, rel=0.01)


def test_adams_epsilon_shortens_steps_along_small_gradients() -> None:
    start = dict(maker_of(experiment("hfedf")).network.named_parameters())
    usual, damped = (
        dict(maker_of(trained(f"hfedf(server_eps={eps})", rounds=1)).network.named_parameters()) for eps in ("1e-8", "1e-2")
    )
    name = "heads.0.bias"
    lengths = [float((learnt[name] - start[name]).detach().norm()) for learnt in (usual, damped)]
    assert lengths[1] < 0.8 * lengths[0]


def test_the_seed_decides_the_hypernetwork_and_nothing_else_does() -> None:
    first = maker_of(experiment("hfedf")).network.state_dict()
    torch.rand(5)
    assert torch_equal(first, maker_of(experiment("pfedhn")).network.state_dict())
    assert not torch_equal(first, maker_of(experiment("hfedf", seed=1)).network.state_dict())


def test_the_size_is_told_before_it_is_built() -> None:
    made = experiment("hfedf")
    assert not made.server.memory
    values = sum(p.numel() for p in TinyNet().parameters())
    count = parameter_count(3, values, 1, 50)
    assert f"has {count:,} parameters and takes {20 * count / 1e6:,.1f} MB" in " ".join(made.notices)


def test_more_than_a_share_of_free_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.methods._shared.generated_weights.free_memory", lambda: 1_000_000)
    with pytest.raises(
        ModelError, match=r'parameters and takes .* MB .*more than 0\.5 of the 1 MB of free memory.*generate="head"'
    ):
        experiment("hfedf")
    trained('hfedf(generate="head")', rounds=1)


def test_free_memory_is_known_here() -> None:
    assert (hypernetwork.free_memory() or 0) > 10_000_000


# --- Embeddings that are not learnt. ---


def test_random_embeddings_are_drawn_anew_after_every_round_and_never_learnt() -> None:
    made = experiment('hfedf(embedding="random")', rounds=3)
    tables = [maker_of(made).network.embedding.weight.detach().clone()]
    made.train([lambda server: tables.append(maker_of(made).network.embedding.weight.detach().clone())])
    drawn = tables[-3:]
    assert len({tuple(table.reshape(-1).tolist()) for table in drawn}) == 3
    for number, table in enumerate(drawn, start=1):
        assert torch.equal(table, torch.randn(3, 1, generator=generator(0, "embeddings", number)))
    near = trained('hfedf(embedding="random", embedding_scale=0.5)', rounds=3)
    assert torch.equal(maker_of(near).network.embedding.weight, 0.5 * drawn[-1])


def test_embeddings_of_the_autoencoder_cannot_be_scaled() -> None:
    with pytest.raises(OptionError, match="embedding_scale has no effect"):
        parse('hfedf(embedding="autoencoder", embedding_scale=0.1)')


def test_autoencoder_embeddings_are_sent_once_standardised_and_fixed() -> None:
    made = experiment('hfedf(embedding="autoencoder", embedding_epochs=3, embedding_dim=2)')
    seen = watched(made)
    tables: list[Tensor] = []
    made.train([lambda server: tables.append(maker_of(made).network.embedding.weight.detach().clone())])
    assert [ask.what for ask, _ in seen] == ["latent_mean", "train", "train"]
    told = {reply.client: reply.extras["latent_mean"] for reply in seen[0][1]}
    known = np.stack([told[info.id].numpy() for info in made.server.clients])
    np.testing.assert_allclose(tables[0].numpy(), (known - known.mean(0)) / known.std(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(tables[0], tables[-1]) and np.std(known) > 0
    assert made.costs.bytes["up"]["training"]["extra"] == 3 * 2 * 4
    assert (
        made.method.facts.data_derived_uploads == "the mean latent vector of its images, once"
        and not parse("hfedf").facts.data_derived_uploads
    )


def test_images_for_the_autoencoder() -> None:
    small = pixels(torch.full((2, 3, 8, 8), 255, dtype=torch.uint8), "a")
    assert small.shape == (2, 3, 32, 32) and float(small.min()) == pytest.approx(1.0)
    with pytest.raises(DataError, match="Client a: embeddings from the auto-encoder need images"):
        pixels(torch.randn(2, 3, 8, 8), "a")


def test_a_client_that_tells_nothing_gets_the_mean() -> None:
    told = {"a": torch.tensor([1.0]), "b": torch.tensor([3.0])}
    assert standardised(told, ["a", "c", "b"], 1).tolist() == [[-1.0], [0.0], [1.0]]
    assert standardised({"a": torch.tensor([5.0])}, ["a"], 1).tolist() == [[0.0]]


# --- The contract. ---


def test_autoencoder_embeddings_keep_the_contract_on_a_model_without_norms() -> None:
    check_method('hfedf(embedding="autoencoder", embedding_epochs=1)', NormFree)
