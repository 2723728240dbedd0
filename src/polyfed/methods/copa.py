"""COPA: one feature extractor, one head per client. Differences from the paper: docs/methods/copa.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from polyfed.core.client import Step
from polyfed.core.entries import HEAD, MIX, BatchNorm
from polyfed.core.evaluation import Newcomer, averaged_state
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.rounds import Exchange, Replies, Reply, standard_round
from polyfed.core.server import Server
from polyfed.core.sharing import head, upload_only
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, ModelError, OptionError
from polyfed.methods._shared import require_choice
from polyfed.methods.guiding import received_head
from polyfed.models.layers.surgery import replace_map_norms

Heads: TypeAlias = "dict[str, dict[str, Tensor]]"
FILE, OTHERS = "copa_heads", "other_heads"
NORMS = ("batch_instance", "keep")


class BatchInstanceNorm(BatchNorm):
    """Batch norm and instance norm with one affine, mixed by rho per channel; rho = 1 is batch norm."""

    entry_kinds: ClassVar[dict[str, str]] = {"rho": MIX}
    rho: nn.Parameter

    @classmethod
    def like(cls, norm: BatchNorm) -> BatchInstanceNorm:
        """Return a layer with the affine, statistics and settings of a batch norm."""
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made._parameters, made._buffers = dict(norm._parameters), dict(norm._buffers)
        anchor = next((t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.empty(0))
        made.rho = nn.Parameter(anchor.new_ones(norm.num_features))
        return made.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 3:
            raise ModelError(f"BatchInstanceNorm requires maps (N, C, ...), got an input of shape {tuple(input.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[2:]) == 1:
            raise ModelError(
                f"copa: instance norm is undefined for feature maps with one position per channel (shape {tuple(x.shape[1:])}). "
                'Use larger inputs, or copa(norm="keep").'
            )
        if self.training:
            with torch.no_grad():
                self.rho.clamp_(0, 1)
        batch = super().forward(x)
        instance = F.group_norm(x, self.num_features, self.weight, self.bias, self.eps)
        # The gradient of clamp is 0 at its bounds, where rho starts. This clamps the value but not the gradient.
        cut = self.rho.detach().clamp(0, 1) + (self.rho - self.rho.detach())
        share = cut.view(1, -1, *([1] * (x.dim() - 2)))
        return share * batch + (1 - share) * instance


@dataclass(frozen=True)
class ToBatchInstanceNorm(Part):
    """Replace every batch norm of feature maps. Batch norms of vectors have no positions and are unchanged."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        advice = 'Use a model with batch norm, or copa(norm="keep").'
        return replace_map_norms(model, BatchInstanceNorm.like, "copa", advice)


@dataclass(frozen=True)
class OtherHeads(Part):
    """Add ``weight`` times the sum of the losses of the other clients' frozen heads on this client's features."""

    weight: float
    needs_features = True

    def __call__(self, step: Step) -> Tensor:
        bench, others = step.client.bench, step.client.extras.get(OTHERS, ())
        own = received_head(step.client) if others else {}
        total = step.task_loss.new_zeros(())
        for entries in others:
            other = own | {bench.head_entries[name]: value for name, value in entries.items()}
            total = total + bench.loss(functional_call(bench.head_module, other, (step.features,)), step.y)
        return self.weight * total


@dataclass(frozen=True)
class HeadRound(Part):
    """Run the standard round, and store each accepted head by client."""

    uses = standard_round.uses

    def __call__(self, server: Server) -> Exchange[None]:
        replies = yield server.request("train", server.sample_clients())
        found: Heads = {}
        server.aggregate(accepted_with_heads(server, replies, found))
        filed = heads_of(server)
        server.memory[FILE] = filed | {client: entries for client, entries in found.items() if client not in server.rejected}

    def check(self, bench: Workbench) -> None:
        bench.require_head(f"{bench.method}: copa")

    def notice(self, bench: Workbench, clients: int) -> str:
        if clients < 2:
            raise JoinError("copa trains with the heads of other clients, but there is only one client. Remove copa.")
        return ""


def accepted_with_heads(server: Server, replies: Replies, found: Heads) -> Iterator[Reply]:
    """Yield the accepted replies, and record their heads in ``found``."""
    for reply in replies:
        entries = server.validated_entries(reply)
        if entries is not None:
            found[reply.client] = {name: value for name, value in entries.items() if server.plan.entries[name].kind == HEAD}
            yield reply


def heads_of(server: Server) -> Heads:
    return server.persistent(FILE, dict)


def other_heads(server: Server, client: str) -> list[Mapping[str, Tensor]]:
    """Return the stored heads of the other clients, in a fixed order."""
    filed = heads_of(server)
    return [filed[other] for other in sorted(filed) if other != client]


def model_per_head(server: Server) -> Exchange[Newcomer]:
    """Return the averaged extractor with each head; their outputs are averaged."""
    state = yield from averaged_state(server)
    filed = heads_of(server)
    if not filed:
        return Newcomer([(1.0, state)])
    return Newcomer([(1 / len(filed), {**state, **filed[client]}) for client in sorted(filed)])


@register
def copa(weight: float = 1.0, norm: str = "batch_instance") -> Method:
    """Average the feature extractor, keep one head per client, and train features that work with every head.

        loss_i   = l(h_i(g(x)), y) + weight Σ_{j≠i} l(h_j(g(x)), y)        h_j frozen, as client j uploaded it last
        g        ← Σ_k p_k g_k
        newcomer = mean_j softmax(h_j(g(x)))
        norm       y = γ (ρ BN̂(x) + (1 − ρ) IN̂(x)) + β                     ρ per channel in [0, 1], initially 1; one affine

    Args:
        weight: weight of the other heads' losses; 0: none, and no heads are sent.
        norm: batch_instance: mix instance norm into each batch norm; keep: the model's own layers.

    Reference:
        G. Wu and S. Gong. Collaborative Optimization and Aggregation for Decentralized Domain Generalization and Adaptation.
        ICCV 2021.
    """
    if weight < 0:
        raise OptionError(f"copa: weight must not be negative, got {weight}.")
    require_choice("copa", "norm", norm, NORMS)
    replaces = norm == "batch_instance"
    return Method(
        "copa",
        surgery=(ToBatchInstanceNorm(),) if replaces else (),
        sharing=(upload_only(head),),
        objective=(OtherHeads(weight),) if weight else (),
        send_extras={OTHERS: other_heads} if weight else {},
        round=HeadRound(),
        newcomer=model_per_head,
        facts=Facts(
            class_labels=bool(weight),
            batch_norm=replaces,
            client_state=True,
            messages="1, with the other clients' heads" if weight else "1",
            extra_work="one pass through every other client's head per step" if weight else "",
        ),
    )
