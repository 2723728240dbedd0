"""Two toys through the unchanged loop: one that exchanges per layer within a round, one whose server makes each client's weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client, train
from polyfed.core.evaluation import Newcomer
from polyfed.core.method import Facts, Method
from polyfed.core.replies import planned_uploads
from polyfed.core.rounds import Exchange, Payload, Reply, Request, exchange, run_exchange
from polyfed.core.seeds import generator
from polyfed.core.server import Server
from polyfed.core.sharing import bn_statistics, keep_local
from polyfed.errors import ClientFailure
from polyfed.extras import Array, Number
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, check_method, tiny_federation

# --- A toy that talks once per batch-norm layer: the pooled mean of each layer's input, with earlier layers pinned to what is known. ---


def batch_norms(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]


def pin(model: nn.Module, known: dict[str, Tensor]) -> None:
    model.eval()
    for path, mean in known.items():
        model.get_submodule(path).running_mean.copy_(mean)  # type: ignore[union-attr, operator]


def layer_mean(client: Client, payload: Payload) -> Payload:
    client.receive(payload.entries)
    path, known = payload.extras["layer"], payload.extras["known"]
    pin(client.model, known)
    caught: list[Tensor] = []
    hook = client.model.get_submodule(path).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        client.model(client.bench.preparation.for_testing(client.data.train.batch(slice(None))[0]))
    hook.remove()
    return Payload(extras={"mean": caught[0].mean(dim=(0, 2, 3)), "count": len(caught[0])})


def train_pinned(client: Client, payload: Payload) -> Payload:
    client.memory["means"] = dict(payload.extras["known"])
    return train(client, payload)


@exchange(uses=("sharing", "objective", "gradients"))
def layerwise_round(server: Server) -> Exchange[None]:
    clients = server.sample_clients()
    known: dict[str, Tensor] = {}
    for layer in batch_norms(server.blueprint):
        question = Payload(server.outgoing(""), {"layer": layer, "known": dict(known)})
        replies = list((yield Request("layer_mean", dict.fromkeys(clients, question), round=server.round)))
        total = sum(r.extras["count"] for r in replies)
        known[layer] = sum(r.extras["count"] / total * r.extras["mean"] for r in replies)
    server.memory["means"] = known
    server.num_requested = len(clients)
    replies = yield Request(
        "train_pinned", dict.fromkeys(clients, Payload(server.outgoing(""), {"known": known})), round=server.round
    )
    server.aggregate(replies)


LAYERWISE = Method(
    "layerwise", round=layerwise_round, answers={"layer_mean": layer_mean, "train_pinned": train_pinned},
    reply_extras={"layer_mean": {"mean": Array((8,)), "count": Number(1, 1e6, whole=True)}},
    reply_entries={"train_pinned": planned_uploads},
    facts=Facts(client_state=True, data_derived_uploads="the mean of each layer's input", granularity="aggregate", messages="L + 1"),
)  # fmt: skip


def test_exchanges_per_layer_within_a_round_give_the_unions_means() -> None:
    federation = tiny_federation()
    torch.manual_seed(3)
    start = TinyNet()
    experiment = Experiment(Settings(rounds=1, batch_size=4), federation, LAYERWISE, start)
    experiment.train()
    union = torch.cat([federation.preparation.for_testing(c.train.batch(slice(None))[0]) for c in federation.clients])
    model = copy.deepcopy(start).eval()
    with torch.no_grad():
        for path in batch_norms(model):
            caught: list[Tensor] = []
            hook = model.get_submodule(path).register_forward_pre_hook(lambda _, inputs, caught=caught: caught.append(inputs[0]))
            model(union)
            hook.remove()
            expected = caught[0].mean(dim=(0, 2, 3))
            torch.testing.assert_close(experiment.server.memory["means"][path], expected, rtol=1e-5, atol=1e-6)
            model.get_submodule(path).running_mean.copy_(expected)  # type: ignore[union-attr, operator]
    assert experiment.costs.messages["training"] == 3 * (2 + 1)


def test_the_layerwise_toy_keeps_the_contract() -> None:
    check_method(LAYERWISE)


# --- A toy hypernetwork: the server makes client i's weights from an embedding, and learns from what comes back. ---


class Hyper(nn.Module):
    """theta_i = base + map(embedding_i), for every trainable entry."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(0)
        self.names = [n for n, e in server.plan.entries.items() if e.trainable]
        self.ids = [info.id for info in server.clients]
        self.embedding = nn.Parameter(torch.randn(len(self.ids), 2, generator=stream))
        self.bases = nn.ParameterList([server.state[n].clone() for n in self.names])
        self.maps = nn.ParameterList([0.01 * torch.randn(2, *server.state[n].shape, generator=stream) for n in self.names])

    def forward(self, client: str) -> dict[str, Tensor]:
        e = self.embedding[self.ids.index(client)]
        return {n: base + torch.tensordot(e, m, dims=1) for n, base, m in zip(self.names, self.bases, self.maps, strict=True)}


class Generator:
    """Hypernetwork and optimizer, checkpointed as one."""

    def __init__(self, server: Server) -> None:
        self.hyper = Hyper(server)
        self.optimizer = torch.optim.SGD(self.hyper.parameters(), lr=0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"hyper": self.hyper.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hyper.load_state_dict(state["hyper"])
        self.optimizer.load_state_dict(state["optimizer"])


def made_for(server: Server, client: str) -> dict[str, Tensor]:
    made = server.persistent("hyper", lambda: Generator(server)).hyper(client)
    return {name: value.detach() for name, value in made.items()}


@exchange(uses=("objective", "gradients", "sharing", "outgoing"))
def generated_round(server: Server) -> Exchange[None]:
    maker = server.persistent("hyper", lambda: Generator(server))
    for client in server.sample_clients():
        for reply in (yield Request("train", {client: Payload(made_for(server, client))}, round=server.round)):
            made = maker.hyper(client)
            maker.optimizer.zero_grad()
            torch.autograd.backward(list(made.values()), [(made[n] - reply.entries[n]).detach() for n in made])
            maker.optimizer.step()


def every_generated(server: Server) -> Exchange[Newcomer]:
    yield from ()
    states = [server.state | made_for(server, info.id) for info in server.clients]
    return Newcomer([(1 / len(states), state) for state in states], score="mean_of_models")


HYPERNETWORK = Method(
    "toy_hypernetwork", round=generated_round, outgoing=made_for, newcomer=every_generated,
    sharing=(keep_local(bn_statistics),), facts=Facts(client_state=True),
)  # fmt: skip


def test_each_client_is_sent_its_own_weights_and_embeddings_never_travel() -> None:
    experiment = Experiment(Settings(rounds=1, batch_size=4), tiny_federation(), HYPERNETWORK, TinyNet())
    asked: list[Request] = []

    def watched(request: Request) -> Any:
        asked.append(request)
        yield from experiment.backend(request)

    experiment.server.start_round(1, 0)
    run_exchange(generated_round(experiment.server), watched)
    sent = [payload.entries for ask in asked for payload in ask.payloads.values()]
    assert len(sent) == 3 and not torch.equal(sent[0]["head.weight"], sent[1]["head.weight"])
    allowed = {n for n, e in experiment.bench.plan.entries.items() if e.trainable}
    assert all(set(entries) == allowed for entries in sent)


def test_the_server_learns_through_the_generated_weights() -> None:
    """The vector-Jacobian product by hand: theta = base + e . M, so d base = delta, d M_j = e_j delta, d e_j = <M_j, delta>."""
    federation = tiny_federation({"only": 12})
    torch.manual_seed(3)
    start = TinyNet()
    experiment = Experiment(Settings(rounds=1, batch_size=4, lr=0.05), federation, HYPERNETWORK, start)
    before = Hyper(experiment.server)
    experiment.train()
    after = experiment.server.memory["hyper"].hyper
    e = before.embedding[0].detach()
    sent = {n: v.detach() for n, v in before("only").items()}
    model = copy.deepcopy(start).train()
    model.load_state_dict(sent, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for chunk in torch.randperm(12, generator=generator(0, "client", 1, "only")).split(4):
        x, y = federation.clients[0].train.batch(chunk)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gradient_of_e = torch.zeros(2)
    for index, name in enumerate(before.names):
        delta = sent[name] - dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(after.bases[index].detach(), before.bases[index].detach() - 0.1 * delta, rtol=1e-4, atol=1e-6)
        for j in (0, 1):
            expected = before.maps[index][j].detach() - 0.1 * e[j] * delta
            torch.testing.assert_close(after.maps[index][j].detach(), expected, rtol=1e-4, atol=1e-6)
            gradient_of_e[j] += (before.maps[index][j].detach() * delta).sum()
    torch.testing.assert_close(after.embedding[0].detach(), e - 0.1 * gradient_of_e, rtol=1e-4, atol=1e-6)


def test_the_hypernetwork_toy_keeps_the_contract_and_scores_newcomers() -> None:
    check_method(HYPERNETWORK)
    experiment = Experiment(Settings(rounds=2, batch_size=4), tiny_federation(), HYPERNETWORK, TinyNet())
    experiment.train()
    rows = experiment.evaluate()
    assert {row.client for row in rows if row.view == "seen"} == {"big", "middle", "small"}
    assert [row.domain for row in rows if row.view == "unseen"] == ["new"]


# --- Openings, extras and lazy replies. ---


@exchange()
def hand_out(server: Server) -> Exchange[None]:
    replies = yield Request("collect", {info.id: Payload() for info in server.clients})
    bank = {reply.client: reply.extras["mean"] for reply in replies}
    yield Request("take", {info.id: Payload(extras={"bank": bank}) for info in server.clients})


def collect(client: Client, _: Payload) -> Payload:
    return Payload(extras={"mean": client.data.train.batch(slice(None))[0].float().mean()})


def take(client: Client, payload: Payload) -> None:
    client.memory["others"] = [mean for who, mean in payload.extras["bank"].items() if who != client.id]


OPENING = Method(
    "setup_toy", setup=(hand_out,), answers={"collect": collect, "take": take}, reply_extras={"collect": {"mean": Array((), minimum=0, maximum=255)}},
    facts=Facts(client_state=True, data_derived_uploads="the mean of all pixels, once", granularity="aggregate"),
)  # fmt: skip


def test_an_opening_whose_last_replies_nobody_reads_is_still_delivered() -> None:
    experiment = Experiment(Settings(rounds=1, batch_size=4), tiny_federation(), OPENING, TinyNet())
    experiment.train()
    assert all(len(kept.memory["others"]) == 2 for kept in experiment.backend.client_states.values())
    assert experiment.costs.bytes["up"]["training"]["extra"] == 3 * 4
    check_method(OPENING)


def test_replies_come_in_the_fixed_order_and_only_when_looked_at() -> None:
    experiment = Experiment(Settings(rounds=1, batch_size=4), tiny_federation({"b": 5, "a": 5, "z": 9}), "fedavg", TinyNet())
    experiment.server.start_round(1, 0)
    replies = experiment.backend(experiment.server.request("train", experiment.server.sample_clients()))
    first: Reply = next(replies)
    assert first.client == "z" and set(experiment.backend.losses) == {"z"}
    assert [reply.client for reply in replies] == ["a", "b"]


def fail_in_round_two(client: Client) -> None:
    if client.round == 2 and client.id == "middle":
        raise ValueError("something of mine")


def test_a_failure_names_client_round_question_and_stage_and_debug_keeps_its_inputs() -> None:
    failing = Method("failing", before_training=(fail_in_round_two,))
    for backend in ("process", "debug"):
        experiment = Experiment(Settings(rounds=3, batch_size=4, backend=backend), tiny_federation(), failing, TinyNet())
        with pytest.raises(
            ClientFailure, match=r"Client middle, round 2, request 'train', stage 'before_training': ValueError: something of mine"
        ) as caught:
            experiment.train()
        assert (caught.value.inputs is None) == (backend == "process")
    kept = caught.value.inputs
    assert (kept.client, kept.round, kept.what) == ("middle", 2, "train")
    assert torch.equal(kept.payload.entries["head.weight"], experiment.server.state["head.weight"])
