"""Methods with a hypernetwork: the generated entries, the server optimizer, the payloads and the newcomer models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from polyfed.core.entries import HEAD, WEIGHT, Entry
from polyfed.core.evaluation import Newcomer, client_states
from polyfed.core.method import Facts, Granularity, Method
from polyfed.core.part import Part
from polyfed.core.rounds import Exchange, Reply, Request
from polyfed.core.seeds import default_stream
from polyfed.core.server import Server
from polyfed.core.sharing import Plan, Rule, bn_statistics
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, ModelError, OptionError
from polyfed.methods._shared import require_choice
from polyfed.methods._shared.hypernetwork import Generator, Hypernetwork, free_memory, parameter_count

MEMORY = "hypernetwork"
STATISTICS_STAY = Rule(bn_statistics, up=False, down=False, keep=True, optional=True)
"""Entry kinds that can be generated: all except statistics and counters."""

USED_SLOTS = frozenset(
    {"sharing", "inputs", "before_training", "after_training", "objective", "task_loss", "gradients", "outgoing", "send_extras"}
    | {"after_round"}
)
"""Slots of local training, which other parts may fill. The hypernetwork aggregates, and deltas need unchanged uploads."""

EMBEDDINGS = ("learnt", "random", "autoencoder")
HEAD_INITS = ("initial", "match", "default")
OPTIMIZERS = ("adam", "sgd")
ADAM_EPS = 1e-8
HYPERNETWORK_OPTIONS: Mapping[str, str] = {
    "server_lr": "learning rate of the hypernetwork.",
    "server_weight_decay": "its weight decay.",
    "embedding_dim": "length of a client's embedding; 0: floor(1 + clients / 4).",
    "embedding_scale": "standard deviation of initial embeddings; smaller values keep clients' models more similar.",
    "generate": 'all, head, last_stage, or patterns over entry names such as "layer4.*, fc.*"; the rest is averaged.',
    "head_init": "initial: heads start with the model's initial values; match: with their mean and spread; default: with torch's initialisation.",
    "width": "width of the hypernetwork's layers.",
    "server_optimizer": "adam or sgd.",
    "server_momentum": "momentum of sgd.",
    "server_eps": "epsilon of adam; larger values shorten the steps of rarely updated weights.",
    "trunk_rate": "learning rate of trunk and embeddings, in multiples of server_lr; 0 trains only the heads.",
    "server_clip": "largest norm of the hypernetwork's gradient; 0: no limit.",
    "memory_share": "fraction of free memory that the hypernetwork may use.",
}


@dataclass(frozen=True)
class ServerOptimizer:
    """The optimizer of the hypernetwork, as options."""

    method: str
    kind: str
    lr: float
    weight_decay: float
    momentum: float
    clip: float
    eps: float = ADAM_EPS
    trunk_rate: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self.method, "server_optimizer", self.kind, OPTIMIZERS)
        for option in ("lr", "weight_decay", "momentum", "clip"):
            if not (math.isfinite(value := getattr(self, option)) and value >= 0):
                raise OptionError(f"{self.method}: server_{option} must not be negative, got {value}.")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise OptionError(f"{self.method}: server_eps must be positive, got {self.eps}.")
        if not (math.isfinite(self.trunk_rate) and self.trunk_rate >= 0):
            raise OptionError(f"{self.method}: trunk_rate must not be negative, got {self.trunk_rate}.")
        if self.kind != "adam" and self.eps != ADAM_EPS:
            raise OptionError(
                f"{self.method}: server_eps applies to adam, but server_optimizer is {self.kind}. Remove it, or use adam."
            )

    @property
    def moments(self) -> int:
        return 2 if self.kind == "adam" else int(self.momentum > 0)

    def build(self, network: Hypernetwork) -> torch.optim.Optimizer:
        """Build the optimizer. The fused version takes a quarter of the time per step and copies no head."""
        if self.kind == "adam":
            return torch.optim.Adam(self.groups(network), lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, fused=True)
        return torch.optim.SGD(self.groups(network), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True)

    def groups(self, network: Hypernetwork) -> list[dict[str, Any]]:
        """Return the learned parameters: one group, or two if ``trunk_rate`` sets a different rate for trunk and embeddings."""
        learnt = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if self.trunk_rate == 1:
            return [{"params": list(learnt.values())}]
        heads = [p for name, p in learnt.items() if name.startswith("heads.")]
        rest = [p for name, p in learnt.items() if not name.startswith("heads.")]
        return [{"params": rest, "lr": self.trunk_rate * self.lr}, {"params": heads}]


@dataclass(frozen=True)
class Generation:
    """The generated entries and the hypernetwork; the options of hfedf and pfedhn."""

    method: str
    optimizer: ServerOptimizer
    generate: str
    embedding: str
    embedding_dim: int
    embedding_scale: float
    head_init: str
    width: int
    memory_share: float
    extra_copies: int

    def __post_init__(self) -> None:
        require_choice(self.method, "embedding", self.embedding, EMBEDDINGS)
        require_choice(self.method, "head_init", self.head_init, HEAD_INITS)
        if self.width < 1 or self.embedding_dim < 0 or not 0 < self.memory_share <= 1:
            raise OptionError(
                f"{self.method}: width must be at least 1, embedding_dim not negative and memory_share between 0 and 1, "
                f"got width={self.width}, embedding_dim={self.embedding_dim}, memory_share={self.memory_share}."
            )
        if not (math.isfinite(self.embedding_scale) and self.embedding_scale >= 0):
            raise OptionError(f"{self.method}: embedding_scale must not be negative, got {self.embedding_scale}.")

    def names(self, plan: Plan) -> list[str]:
        """Return the generated entries: trainable, exchanged in every round, and selected by ``generate``."""
        chosen = selected(plan.entries, self.generate)
        phases = plan.phases.values()
        return [n for n in chosen if plan.entries[n].trainable and all(p.travels[n].up and p.travels[n].down for p in phases)]

    def check(self, bench: Workbench) -> None:
        """Check that there are entries to generate, that they fit into memory, and that no other part reduces them."""
        if self.generate in ("head", "last_stage"):
            bench.require_head(f'{self.method}: generate="{self.generate}"')
        names = self.names(bench.plan)
        if not names:
            raise ModelError(
                f"{self.method}: generate={self.generate!r} matches no trainable entry that is exchanged. "
                f"Use all, head, last_stage, or patterns over names such as {', '.join(list(bench.parameters)[:3])}."
            )
        refuse_ignored_reducers(self.method, bench.plan, names)
        self.require_memory(bench.plan, clients=1)

    def notice(self, bench: Workbench, clients: int) -> str:
        return f"{self.require_memory(bench.plan, clients)}."

    def generator(self, server: Server) -> Generator:
        return server.persistent(MEMORY, lambda: self.built(server))

    def built(self, server: Server, embeddings: Tensor | None = None) -> Generator:
        """Build a hypernetwork for this server's model and clients from a separate random stream."""
        names, entries, ids = self.names(server.plan), server.plan.entries, [info.id for info in server.clients]
        self.require_memory(server.plan, len(ids))
        with default_stream(server.settings.seed, MEMORY):
            network = Hypernetwork(len(ids), {n: entries[n].shape for n in names}, self.dimension(len(ids)), self.width)
        network.embedding.weight.data.mul_(self.embedding_scale)
        network.to(reduce(torch.promote_types, (entries[n].dtype for n in names), torch.float32))
        if embeddings is not None:
            network.embedding.weight.data.copy_(embeddings)
        network.embedding.weight.requires_grad_(self.embedding == "learnt")
        if self.head_init == "initial":
            network.start_at(server.state)
        elif self.head_init == "match":
            network.match(server.state)
        return Generator(network, self.optimizer.build(network), ids, self.optimizer.clip)

    def dimension(self, clients: int) -> int:
        return self.embedding_dim or 1 + clients // 4

    def require_memory(self, plan: Plan, clients: int) -> str:
        """Describe the size of the hypernetwork; reject one that exceeds free memory."""
        names = self.names(plan)
        values = sum(math.prod(plan.entries[name].shape) for name in names)
        count = parameter_count(clients, values, self.dimension(clients), self.width)
        size, free = 4 * count * (2 + self.optimizer.moments + self.extra_copies), free_memory()
        about = (
            f"{self.method}: the hypernetwork that generates {values:,} values in {len(names)} tensors has {count:,} parameters "
            f"and takes {size / 1e6:,.1f} MB with its gradient, optimizer and copies"
        )
        if free is not None and size > self.memory_share * free:
            raise ModelError(
                f"{about}; that is more than {self.memory_share:g} of the {free / 1e6:,.0f} MB of free memory. "
                'Generate fewer entries and average the rest (generate="head"), use a smaller model, or raise memory_share.'
            )
        return about

    def outgoing(self, server: Server, client: str) -> dict[str, Tensor]:
        """Return the client's generated entries, and the server's values of the rest."""
        entries = server.plan.entries
        made = {name: value.to(entries[name].dtype) for name, value in self.generator(server).make(client).items()}
        return {n: server.state[n] for n in server.phase.down if n in server.state and n not in made} | made

    def newcomer(self, server: Server) -> Exchange[Newcomer]:
        """Return every client's model with its local entries; their scores are averaged."""
        if server.plan.has_local_entries:
            states = list((yield from client_states(server)).values())
        else:
            states = [server.state | server.outgoing(info.id) for info in server.clients]
        return Newcomer([(1 / len(states), state) for state in states], score="mean_of_models")

    def deltas(self, server: Server, request: Request, reply: Reply) -> dict[str, Tensor]:
        """Return the sent minus the returned values of the generated entries."""
        sent, wide = request.payloads[reply.client].entries, self.generator(server).network.embedding.weight.dtype
        return {n: sent[n].to(wide) - reply.entries[n].to(wide) for n in self.generator(server).network.shapes}

    def absorbed(self, server: Server, request: Request, replies: Iterable[Reply]) -> dict[str, dict[str, Tensor]]:
        """Aggregate the replies, which averages the other entries, and return the deltas of accepted clients."""
        deltas: dict[str, dict[str, Tensor]] = {}

        def noting() -> Iterator[Reply]:
            for reply in replies:
                yield reply
                if reply.client not in server.rejected:
                    deltas[reply.client] = self.deltas(server, request, reply)

        server.aggregate(noting())
        return deltas


@dataclass(frozen=True)
class GeneratedRound(Part):
    """Base of rounds in which clients train on generated models."""

    generation: Generation
    uses = USED_SLOTS

    def check(self, bench: Workbench) -> None:
        self.generation.check(bench)

    def notice(self, bench: Workbench, clients: int) -> str:
        return self.generation.notice(bench, clients)


def refuse_ignored_reducers(method: str, plan: Plan, generated: Sequence[str]) -> None:
    """Reject a part that reduces only generated entries, because it would be ignored."""
    uploaded = {name for phase in plan.phases.values() for name in phase.up}
    for rule in plan.rules:
        matched = [n for n, e in plan.entries.items() if n in uploaded and rule.reduce is not None and rule.select.matches(e)]
        if matched and set(matched) <= set(generated):
            raise JoinError(
                f"{method} generates {rule.select.label}, so {rule.part or 'a rule'}, which reduces it, would be ignored."
            )


def selected(entries: Mapping[str, Entry], generate: str) -> list[str]:
    """Return the names of the entries that ``generate`` selects."""
    own = {name: entry for name, entry in entries.items() if entry.of is None}
    if generate == "all":
        return list(own)
    if generate == "head":
        return [name for name, entry in own.items() if entry.kind == HEAD]
    if generate == "last_stage":
        return last_stage(own)
    patterns = [pattern.strip() for pattern in generate.split(",")]
    return [name for name in own if any(fnmatchcase(name, pattern) for pattern in patterns)]


def last_stage(entries: Mapping[str, Entry]) -> list[str]:
    """Return the head, and the last stage of the body with weights and everything after it.

    Stages are the body's outermost modules; a module that contains the whole body is searched.
    """
    weights = [name.split(".") for name, entry in entries.items() if entry.kind == WEIGHT]
    heads = {name for name, entry in entries.items() if entry.kind == HEAD}
    if not weights:
        return [name for name in entries if name in heads]
    depth = 0
    while len({parts[depth] for parts in weights}) == 1 and min(map(len, weights)) > depth + 2:
        depth += 1
    stage = weights[-1][: depth + 1]
    names = list(entries)
    start = next(index for index, name in enumerate(names) if name.split(".")[: depth + 1] == stage)
    return [name for index, name in enumerate(names) if index >= start or name in heads]


def generating_method(
    generation: Generation,
    hold: Callable[[Server], Exchange[None]],
    data_derived_uploads: str = "",
    granularity: Granularity = "",
    **slots: Any,
) -> Method:
    """Build a method whose server generates the clients' models."""
    return Method(
        generation.method,
        sharing=(STATISTICS_STAY,),
        outgoing=generation.outgoing,
        round=hold,
        newcomer=generation.newcomer,
        facts=Facts(
            client_state=True,
            data_derived_uploads=data_derived_uploads,
            granularity=granularity,
            extra_work=f"server: a hypernetwork with {generation.width + 1} parameters per generated value",
        ),
        **slots,
    )
