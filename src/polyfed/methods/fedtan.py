"""FedTAN: batch-norm statistics of the union of all clients' batches. Differences from the paper: docs/methods/fedtan.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.client import Client, train
from polyfed.core.entries import BatchNorm
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declared
from polyfed.core.replies import RequestContext, planned_uploads
from polyfed.core.rounds import TRAINING, Exchange, Payload, Replies, Request, exchange
from polyfed.core.server import Server
from polyfed.core.workbench import PRECISIONS, Workbench
from polyfed.errors import JoinError, ModelError, SettingError, TooFewReplies
from polyfed.extras import Array, Extra, Number, Text
from polyfed.models.layers.norms import track
from polyfed.models.layers.surgery import plain_batch_norm, replace_batch_norms

STEP, LAST = "fedtan_step", "fedtan_train"
MEMORY = "fedtan"
FORMS = ({"layer", "mean", "count"}, {"layer", "variance"}, {"layer", "mean_gradient", "variance_gradient"})


class _UnionGradient(torch.autograd.Function):
    """Identity that adds the gradient through the mean and variance of the union to the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, mean_gradient: Tensor, variance_gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, mean_gradient, variance_gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, mean, mean_gradient, variance_gradient = ctx.saved_tensors
        shape, count = channels_of(x), x.numel() // x.shape[1]
        through = mean_gradient.view(shape) + 2 * variance_gradient.view(shape) * (x - mean.view(shape))
        return gradients[0] + through / count, None, None, None


def channels_of(x: Tensor) -> tuple[int, ...]:
    """Return the shape that broadcasts a vector of channels to x."""
    return (1, -1, *([1] * (x.dim() - 2)))


def over_channels(x: Tensor) -> Tensor:
    return x.mean((0, *range(2, x.dim())))


class _TargetReached(Exception):
    """Raised at the requested layer, because later layers are not needed."""


@dataclass
class Pass:
    """One forward pass of the first step: the known statistics of each layer, and the new ones."""

    known: Mapping[str, Mapping[str, Any]]
    order: list[str]
    found: dict[str, Any]
    last: bool = False

    def target(self, path: str) -> bool:
        """Return True if this layer is the last one without gradients."""
        missing = [name for name, facts in self.known.items() if "mean_gradient" not in facts]
        return bool(missing) and path == missing[-1]


class UnionBatchNorm(BatchNorm):
    """Batch norm that can use given statistics in its next training pass; otherwise it is plain batch norm."""

    path = ""
    current: Pass | None = None

    @classmethod
    def like(cls, norm: BatchNorm) -> UnionBatchNorm:
        """Return a layer with the affine, statistics and settings of a batch norm."""
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made._parameters, made._buffers = norm._parameters, norm._buffers
        return made.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"Batch norm requires inputs of shape (N, C) or (N, C, ...), got {tuple(input.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        current = self.current
        if current is None or not self.training:
            return super().forward(x)
        if self.path in current.order:
            raise ModelError(f"fedtan: the batch norm {self.path} is used twice in a step. Use a model where each is used once.")
        current.order.append(self.path)
        facts = current.known.get(self.path, {})
        if current.last:
            self.current = None
            count = facts["count"]
            track(self, facts["mean"], facts["variance"] * (count / max(count - 1, 1)))
        if "variance" not in facts:
            raise self._statistics(x.detach(), facts, current)
        mean, variance = facts["mean"], facts["variance"]
        if "mean_gradient" in facts:
            x = _UnionGradient.apply(x, mean, facts["mean_gradient"], facts["variance_gradient"])
        elif current.target(self.path):
            return self._watched(x, mean, variance, current)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    def _statistics(self, x: Tensor, facts: Mapping[str, Any], current: Pass) -> _TargetReached:
        """Compute the mean or, if the mean is known, the variance."""
        current.found["layer"] = self.path
        if "mean" in facts:
            current.found["variance"] = over_channels((x - facts["mean"].view(channels_of(x))).square())
        else:
            current.found |= {"mean": over_channels(x), "count": x.numel() // x.shape[1]}
        return _TargetReached()

    def _watched(self, x: Tensor, mean: Tensor, variance: Tensor, current: Pass) -> Tensor:
        """Normalise, and let gradients flow to mean and variance."""
        shape = channels_of(x)
        mean, variance = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        current.found |= {"layer": self.path, "leaves": (mean, variance)}
        y = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        y = y if self.weight is None else y * self.weight.view(shape)
        return y if self.bias is None else y + self.bias.view(shape)


@dataclass(frozen=True)
class ToUnion(Part):
    """Replace every batch norm by one that can use given statistics."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        model = replace_batch_norms(model, lambda norm: UnionBatchNorm.like(plain_batch_norm(norm, "fedtan")), "fedtan")
        for path, module in model.named_modules():
            if isinstance(module, UnionBatchNorm):
                module.path = path
        return model

    def check(self, bench: Workbench) -> None:
        """Require equal models at all clients, and reject compiled steps, which would reuse the statistics of one round."""
        if bench.settings.compile != "off":
            raise SettingError(
                "fedtan changes the statistics of batch norms in each round, which compiled steps do not support. Use --compile off."
            )
        if any(declared(term).runs_model for term in bench.method.objective):
            raise JoinError(
                f"{bench.method}: a part runs the model a second time in a step, and fedtan exchanges statistics of one pass. Use only one of the two."
            )
        if bench.plan.has_local_entries or bench.method.outgoing is not None:
            raise JoinError(f"{bench.method}: fedtan needs the same model at all clients. Remove the part that keeps layers local.")


def set_pass(model: nn.Module, current: Pass | None) -> None:
    """Set the next pass of every batch norm of the model; None for plain batch norm."""
    for module in model.modules():
        if isinstance(module, UnionBatchNorm):
            module.current = current


def merged_memory(client: Client, payload: Payload) -> dict[str, Any]:
    """Return the model and all statistics of this round, including those in this message."""
    if "layer" not in payload.extras:
        return {"entries": payload.entries, "extras": payload.extras, "layers": {}}
    before: dict[str, Any] = client.memory[MEMORY]
    layer = payload.extras["layer"]
    added = {key: value for key, value in payload.extras.items() if key != "layer"}
    return before | {"layers": before["layers"] | {layer: {**before["layers"].get(layer, {}), **added}}}


def answer_step(client: Client, payload: Payload) -> Payload:
    """Repeat the first step up to the first unknown statistics, and reply with them."""
    memory = client.memory[MEMORY] = merged_memory(client, payload)
    client.extras = memory["extras"]
    client.receive(memory["entries"])
    client.model.train()
    current = Pass(memory["layers"], [], {})
    set_pass(client.model, current)
    try:
        x, y = next(client.batches())
        loss = client.full_loss(client.forward(0, x, y))
        if "leaves" not in current.found:
            raise ModelError(
                "fedtan: a batch norm of the model is not used in its forward pass. Remove the layer, or use another model."
            )
        gradients = torch.autograd.grad(loss, current.found.pop("leaves"))
    except _TargetReached:
        current.found.pop("leaves", None)
        return Payload(extras=current.found)
    finally:
        set_pass(client.model, None)
    return Payload(extras=current.found | {"mean_gradient": gradients[0], "variance_gradient": gradients[1]})


def train_with_union(client: Client, payload: Payload) -> Payload:
    """Train as usual, but take the first step with all exchanged statistics and gradients."""
    memory = merged_memory(client, payload)
    # Replaces the whole model, which the previous messages stored here.
    client.memory[MEMORY] = client.round
    set_pass(client.model, Pass(memory["layers"], [], {}, last=True))
    try:
        return train(client, Payload(memory["entries"], memory["extras"]))
    finally:
        set_pass(client.model, None)


def channels_in(server: Server) -> dict[str, int]:
    """Return the number of channels of each batch norm, by path."""
    return {module.path: module.num_features for module in server.blueprint.modules() if isinstance(module, UnionBatchNorm)}


def channels_by_layer(context: RequestContext) -> dict[str, int]:
    return channels_in(context.server)


def vectors(context: RequestContext) -> list[tuple[int, ...]]:
    """Return the valid shapes of statistics: one number per channel of a layer."""
    return [(channels,) for channels in sorted(set(channels_by_layer(context).values()))]


def computed_in(context: RequestContext) -> list[torch.dtype]:
    own = {p.dtype for p in context.server.blueprint.parameters()}
    return sorted(own | ({PRECISIONS[context.server.settings.amp]} if context.server.settings.amp != "off" else set()), key=str)


STATISTICS: Mapping[str, Extra] = {
    "layer": Text(choices=channels_by_layer),
    "count": Number(1, 1e12, whole=True, required=False),
    "mean": Array(vectors, computed_in, required=False),
    "variance": Array(vectors, computed_in, minimum=0, required=False),
    "mean_gradient": Array(vectors, computed_in, required=False),
    "variance_gradient": Array(vectors, computed_in, required=False),
}
"""Extras that a reply about a layer may contain; ``fitting`` checks that they fit the current exchange."""


def fitting(server: Server, replies: Replies) -> Replies:
    """Yield the replies that have the same statistics of the same layer, one number per channel; reject the others."""
    channels = channels_in(server)
    expected: tuple[str, set[str]] | None = None
    for reply in replies:
        layer, statistics = reply.extras["layer"], set(reply.extras)
        vectors = [value for value in reply.extras.values() if isinstance(value, Tensor)]
        fits = layer in channels and statistics in FORMS and all(tuple(vector.shape) == (channels[layer],) for vector in vectors)
        if not fits or expected not in (None, (layer, statistics)):
            server.reject(reply.client, f"{sorted(statistics)} of {layer!r} are not the requested statistics")
            continue
        expected = (layer, statistics)
        yield reply


def averaged(server: Server, replies: Replies) -> dict[str, Any]:
    """Return the weighted mean of the clients' statistics; counts are summed."""
    sums: dict[str, Any] = {}
    total = 0.0
    kinds: dict[str, torch.dtype] = {}
    for reply in fitting(server, replies):
        weight = server.weight(reply)
        total += weight
        for key, value in reply.extras.items():
            if isinstance(value, Tensor):
                kinds[key] = torch.promote_types(value.dtype, kinds.get(key, value.dtype))
                sums[key] = sums.get(key, 0.0) + weight * value.double()
            else:
                sums[key] = value if key == "layer" else sums.get(key, 0) + value
    if not total:
        raise TooFewReplies(f"Round {server.round}: no client replied with batch-norm statistics.")
    return {key: (value / total).to(kinds[key]) if isinstance(value, Tensor) else value for key, value in sums.items()}


@exchange(
    uses=("sharing", "receiving", "inputs", "after_training", "objective", "task_loss", "gradients", "uploads")
    + ("send_extras", "server_step", "after_round")
)
def layerwise_round(server: Server) -> Exchange[None]:
    """Run two exchanges per batch norm forwards and one backwards, then train as usual."""
    clients = server.sample_clients()
    layers = len(channels_in(server))
    replies = yield server.request(STEP, clients)
    for message in (*[STEP] * (3 * layers - 1), LAST):
        same = Payload(extras=averaged(server, replies))
        sound = [client for client in clients if client not in server.rejected]
        replies = yield Request(message, dict.fromkeys(sound, same), TRAINING, server.round, server.attempt)
    server.aggregate(replies)


@register
def fedtan() -> Method:
    """Take the first step of each round with joint batch-norm statistics and gradients of all clients.

        forward 1:   mu = sum_k p_k mean(x_k)
        forward 2:   v  = sum_k p_k mean((x_k - mu)^2);      y = gamma (x - mu) / sqrt(v + eps) + beta
        backward:    g_mu = sum_k p_k dL_k/dmu,   g_v = sum_k p_k dL_k/dv
                     dL_k/dx = direct term + g_mu / m_k + g_v 2 (x - mu) / m_k

    m_k is the number of values per channel in client k's batch. Running statistics follow (mu, v * m/(m - 1)) with m = sum_k m_k.
    Later steps are local. With L batch norms, a round takes 3L + 1 messages per client.

    Reference:
        Y. Wang et al. Why Batch Normalization Damage Federated Learning on Non-IID Data? 2023. Also in FixBN Table 4.
    """
    return Method(
        "fedtan",
        surgery=(ToUnion(),),
        round=layerwise_round,
        answers={STEP: answer_step, LAST: train_with_union},
        reply_extras={STEP: STATISTICS},
        reply_entries={LAST: planned_uploads},
        facts=Facts(
            batch_norm=True,
            client_state=True,
            full_participation=True,
            data_derived_uploads="for each batch norm and round: mean, variance and their gradients of one batch, and its number of values",
            granularity="aggregate",
            messages="3L + 1 (L batch norms)",
            extra_work="the first step computed 3L more times",
        ),
    )
