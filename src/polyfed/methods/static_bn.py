"""Static batch norm (HeteroFL). Differences from the paper: docs/methods/static_bn.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.entries import COUNTER, STATISTIC, estimate_statistics
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declared
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import EVALUATION, Exchange, Payload, Replies, Request
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, bn_statistics
from polyfed.core.workbench import CPU, Workbench
from polyfed.errors import JoinError, TooFewReplies

REQUEST = "static_bn_statistics"


def local_statistics(client: Client, payload: Payload) -> Payload:
    """Return the mean of the batch statistics of this client's training data, and the number of batches."""
    client.receive(payload.entries)
    images = (client.data.train.batch(chunk)[0].to(client.bench.device) for chunk in _chunks(client))
    estimate_statistics(client.model, map(client.bench.preparation.for_testing, images), "batches")
    entries = client.bench.plan.entries
    return Payload({n: v.detach().to(CPU, copy=True) for n, v in client.bench.live.items() if bn_statistics.matches(entries[n])})


def _chunks(client: Client) -> list[Tensor]:
    """Yield all positions in shuffled batches; a last batch of one sample is merged into the previous one."""
    order = torch.randperm(len(client.data.train), generator=client.generator)
    chunks = list(torch.split(order, client.bench.settings.batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def all_statistics(context: RequestContext) -> list[str]:
    return [name for name, entry in context.plan.entries.items() if bn_statistics.matches(entry)]


def merged(server: Server, replies: Replies) -> dict[str, Tensor]:
    """Return the mean of the clients' statistics, weighted by their number of batches; counters are summed."""
    known = server.plan.entries
    sums: dict[str, Tensor] = {}
    batches: dict[str, Tensor] = {}
    for reply in replies:
        if any(known[name].kind == COUNTER and int(value) < 1 for name, value in reply.entries.items()):
            server.reject(reply.client, "its statistics are of zero batches")
            continue
        for name, value in reply.entries.items():
            if known[name].kind == COUNTER:
                sums[name] = sums[name] + value if name in sums else value
                continue
            count = reply.entries[f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix(".")].double()
            batches[name] = batches.get(name, torch.zeros_like(count)) + count
            sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + count * value.double()
    if not sums:
        raise TooFewReplies("No client replied with batch-norm statistics for the evaluation.")
    return {n: (v / batches[n]).to(known[n].dtype) if known[n].kind == STATISTIC else v for n, v in sums.items()}


@dataclass(frozen=True)
class ReEstimate(Part):
    """Collect statistics of the current model from all clients, once per evaluated model."""

    def __call__(self, server: Server) -> Exchange[None]:
        weights = [value for name, value in server.state.items() if not bn_statistics.matches(server.plan.entries[name])]
        present = [float(server.round), *(float(value.double().sum()) for value in weights)]
        if server.persistent("static_bn", list) == present:
            return
        payloads = {info.id: Payload(server.outgoing(info.id)) for info in server.clients}
        replies = yield Request(REQUEST, payloads, EVALUATION, server.round)
        server.state = server.state | merged(server, replies)
        server.memory["static_bn"] = present

    def check(self, bench: Workbench) -> None:
        """Reject parts that also set the statistics, or that score a model before its statistics are estimated."""
        if any(declared(hook).runs_evaluation for hook in bench.method.before_training):
            raise JoinError(
                "static_bn estimates statistics for evaluations only, so models cannot be scored at the start of a round. Use only one of the two."
            )
        entries = bench.plan.entries.values()
        for rule in bench.plan.rules:
            if rule.part != "static_bn" and any(bn_statistics.matches(e) and rule.select.matches(e) for e in entries):
                raise JoinError(f"{rule.part or 'a rule'} and static_bn both set batch-norm statistics. Use only one of them.")


@register
def static_bn() -> Method:
    """Train without running statistics; estimate them for every evaluation.

        training:     y = gamma (x - mu_batch) / sqrt(sigma2_batch + eps) + beta;    w, gamma, beta averaged as in FedAvg
        evaluation:   client k passes its training data through the server's model in B_k batches: cumulative means mu_k, sigma2_k of the batch statistics
                      mu = sum_k B_k mu_k / sum_k B_k,    sigma2 = sum_k B_k sigma2_k / sum_k B_k

    Reference:
        E. Diao et al. HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients. ICLR
        2021.
    """
    return Method(
        "static_bn",
        sharing=(Rule(bn_statistics, up=False),),
        before_evaluation=(ReEstimate(),),
        answers={REQUEST: local_statistics},
        reply_entries={REQUEST: all_statistics},
        facts=Facts(batch_norm=True, extra_work="one pass over the training data for each evaluation"),
    )
