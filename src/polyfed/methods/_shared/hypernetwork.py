"""A hypernetwork: it generates each client's weights from an embedding and learns from the returned weights.

    z_i = trunk(nu_i);   theta_i,h = W_h z_i + b_h   for every generated tensor h

A client returns other weights; delta_i = sent - returned serves as its gradient. The gradient of the hypernetwork is the
vector-Jacobian product g_i = J_i^T delta_i. Heads have nearly all parameters, and their gradients are outer products:

    dW_h = delta_i,h z_i^T,   db_h = delta_i,h,   hence   <g_i, g_j> over the heads = <delta_i, delta_j> (<z_i, z_j> + 1)

Inner products and weighted sums of the g_i therefore need only the deltas and the z_i. No full client gradient and no graph is ever
stored, and the sum is written into the one gradient buffer, head by head. Autograd is used only for the trunk and the embedding,
which have a few thousand parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SLOPE = 0.01
TRUNK_LAYERS = 4
LOOKED_AT = 16
"""Number of clients used to scale the heads. A few are enough because the spread hardly differs between clients."""

STRAY = 0.1
"""Initial distance of clients' tensors from the common values, as a multiple of their spread. Trunk steps scale with its square."""


class Hypernetwork(nn.Module):
    """Embedding, four linear layers (hFedF, Table 8), and one linear head per generated tensor.

    Args:
        clients: Number of clients, rows of the embedding.
        shapes: Shapes of the generated tensors, by name.
        dimension: Length of a client's embedding.
        width: Width of the linear layers.
    """

    def __init__(self, clients: int, shapes: Mapping[str, tuple[int, ...]], dimension: int, width: int) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.embedding = nn.Embedding(clients, dimension)
        layers: list[nn.Module] = [nn.Linear(dimension, width)]
        for _ in range(TRUNK_LAYERS - 1):
            layers += [nn.LeakyReLU(SLOPE), nn.Linear(width, width)]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(width, math.prod(shape)) for shape in self.shapes.values())

    def forward(self, client: int) -> dict[str, Tensor]:
        z = self.trunk(self.embedding.weight[client])
        return {name: head(z).view(shape) for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)}

    @torch.no_grad()
    def start_at(self, values: Mapping[str, Tensor]) -> None:
        """Start every client's tensors near these values, which become the biases of the heads."""
        self.spread_like(values, STRAY)
        for name, head in zip(self.shapes, self.linear_heads, strict=True):
            head.bias.copy_(values[name].reshape(-1))

    @torch.no_grad()
    def match(self, values: Mapping[str, Tensor]) -> None:
        """Start the generated tensors with the mean and spread of these values, but not with the values themselves."""
        self.spread_like(values, 1.0)
        for name, head in zip(self.shapes, self.linear_heads, strict=True):
            head.bias.fill_(values[name].to(head.bias.dtype).mean())

    @torch.no_grad()
    def spread_like(self, values: Mapping[str, Tensor], share: float) -> None:
        """Scale the weights of the heads so that their output has this fraction of the spread of the values, per tensor."""
        z = self.trunk(self.embedding.weight[:LOOKED_AT])
        for name, head in zip(self.shapes, self.linear_heads, strict=True):
            spread = (head.weight @ z.T).std(dim=0, correction=0).mean()
            wanted = share * values[name].to(z.dtype).std(correction=0)
            head.weight.mul_(wanted / spread if spread > 0 else 0.0)

    @property
    def linear_heads(self) -> list[nn.Linear]:
        return [head for head in self.heads if isinstance(head, nn.Linear)]

    def pull(self, client: int, deltas: Mapping[str, Tensor]) -> Pull:
        """Return one client's contribution to the gradient, without building its full gradient."""
        row = self.embedding.weight[client].detach().requires_grad_()
        flat = [deltas[name].reshape(-1).to(row.dtype) for name in self.shapes]
        with torch.no_grad():
            upstream = torch.stack([head.weight.T @ d for head, d in zip(self.linear_heads, flat, strict=True)]).sum(0)
        with torch.enable_grad():
            z = self.trunk(row)
            of_row, *of_trunk = torch.autograd.grad(z, [row, *self.trunk.parameters()], upstream)
        return Pull(client, flat, z.detach(), torch.cat([g.reshape(-1) for g in of_trunk]), of_row)

    def inner_products(self, pulls: Sequence[Pull]) -> Tensor:
        """Return the matrix <g_i, g_j> of the clients' full gradients in float64; clients must be distinct."""
        z = torch.stack([pull.z for pull in pulls]).double()
        trunk = torch.stack([pull.trunk for pull in pulls]).double()
        deltas = torch.zeros(len(pulls), len(pulls), dtype=torch.float64)
        for index in range(len(self.heads)):
            stacked = torch.stack([pull.deltas[index] for pull in pulls])
            deltas += (stacked @ stacked.T).double()
        products = deltas * (z @ z.T + 1) + trunk @ trunk.T
        if self.embedding.weight.requires_grad:
            products += torch.diag(torch.stack([pull.row.double().square().sum() for pull in pulls]))
        return products

    @torch.no_grad()
    def write_gradient(self, pulls: Sequence[Pull], weights: Tensor) -> None:
        """Put sum_i weights_i g_i into the parameters' gradients."""
        weights = weights.to(self.embedding.weight.dtype)
        weighted_z = weights[:, None] * torch.stack([pull.z for pull in pulls])
        for index, head in enumerate(self.linear_heads):
            stacked = torch.stack([pull.deltas[index] for pull in pulls])
            head.weight.grad = stacked.T @ weighted_z
            head.bias.grad = stacked.T @ weights
        parameters = list(self.trunk.parameters())
        summed = torch.split(weights @ torch.stack([pull.trunk for pull in pulls]), [p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if self.embedding.weight.requires_grad:
            rows = torch.zeros_like(self.embedding.weight)
            for pull, weight in zip(pulls, weights, strict=True):
                rows[pull.client] = weight * pull.row
            self.embedding.weight.grad = rows


@dataclass(frozen=True)
class Pull:
    """One client's contribution to the gradient: deltas per head, z, and the gradients of trunk and embedding row."""

    client: int
    deltas: list[Tensor]
    z: Tensor
    trunk: Tensor
    row: Tensor


def alignment(products: Tensor) -> Tensor:
    """Return the GradAlign weights, softmax_i cos(g_i, mean_j g_j), from the inner products.

    The cosine of a gradient of length zero counts as 0.
    """
    lengths = products.diagonal().clamp_min(0).sqrt() * products.mean().clamp_min(0).sqrt()
    cosines = torch.where(lengths > 0, products.mean(dim=1) / lengths.where(lengths > 0, 1.0), 0.0)
    return cosines.softmax(dim=0)


class Generator:
    """A hypernetwork with its optimizer, checkpointed together.

    Args:
        network: The hypernetwork.
        optimizer: Optimizer of its learned parameters.
        clients: Client ids, in the order of the embedding's rows.
        clip: Largest norm of the gradient; 0: no limit.
    """

    def __init__(self, network: Hypernetwork, optimizer: torch.optim.Optimizer, clients: Sequence[str], clip: float = 0.0) -> None:
        self.network, self.optimizer, self.clip = network, optimizer, clip
        self.rows = {client: row for row, client in enumerate(clients)}

    @torch.no_grad()
    def make(self, client: str) -> dict[str, Tensor]:
        made: dict[str, Tensor] = self.network(self.rows[client])
        return made

    def embeddings(self) -> dict[str, list[float]]:
        table = self.network.embedding.weight.detach()
        return {client: table[row].tolist() for client, row in self.rows.items()}

    def learn(self, deltas: Mapping[str, Mapping[str, Tensor]], align: bool, smoothing: float | None = None) -> Tensor:
        """Take one optimizer step along the combined client gradient, and return the client weights.

        Args:
            deltas: Sent - returned, by client and entry name.
            align: Weight clients by GradAlign; otherwise equally.
            smoothing: Weight of the new parameters in the moving average that replaces them; None: 1.
        """
        pulls = [self.network.pull(self.rows[client], delta) for client, delta in deltas.items()]
        equal = torch.full((len(pulls),), 1 / len(pulls), dtype=torch.float64)
        weights = alignment(self.network.inner_products(pulls)) if align else equal
        self.network.write_gradient(pulls, weights)
        learnt = [p for p in self.network.parameters() if p.requires_grad]
        if self.clip:
            nn.utils.clip_grad_norm_(learnt, self.clip)
        before = None if smoothing is None else [p.detach().clone() for p in learnt]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if before is not None and smoothing is not None:
            average_with(before, learnt, smoothing)
        return weights

    def state_dict(self) -> dict[str, Any]:
        return {"network": dict(self.network.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(dict(state["optimizer"]))


@torch.no_grad()
def average_with(before: Sequence[Tensor], parameters: Sequence[nn.Parameter], share: float) -> None:
    """Replace parameters by share * parameters + (1 - share) * before, and overwrite ``before``."""
    for old, parameter in zip(before, parameters, strict=True):
        parameter.copy_(old.lerp_(parameter, share))


def parameter_count(clients: int, values: int, dimension: int, width: int) -> int:
    trunk = (dimension + 1) * width + (TRUNK_LAYERS - 1) * (width + 1) * width
    return clients * dimension + trunk + (width + 1) * values


def free_memory() -> int | None:
    """Return the bytes of memory available without swapping; None if unknown."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    names = getattr(os, "sysconf_names", {})
    pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return None if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
