"""IBN-a: instance norm on half of the channels. Differences from the paper: docs/methods/ibn.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.entries import BatchNorm
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.errors import ModelError
from polyfed.models.layers.norms import InstanceNorm
from polyfed.models.layers.surgery import MAPS, modules_at, places_named, plain_batch_norm, replace_modules, stages_of

RESNET_STAGES = ("layer1", "layer2", "layer3")


class IBN(nn.Module):
    """Instance norm on the first channels, batch norm on the rest, taken from a batch norm."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__()
        self.split = norm.num_features // 2
        anchor = next((tensor for tensor in (*norm.parameters(), *norm.buffers())), torch.empty(0))
        self.instance_half = InstanceNorm(self.split, norm.eps).to(anchor)
        rest = norm.num_features - self.split
        self.batch_half = type(norm)(rest, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.batch_half.to(device=anchor.device, dtype=anchor.dtype)
        with torch.no_grad():
            for name, tensor in norm.state_dict().items():
                half = tensor[self.split :] if tensor.dim() else tensor
                self.batch_half.state_dict()[name].copy_(half)
                if name in ("weight", "bias"):
                    self.instance_half.state_dict()[name].copy_(tensor[: self.split])
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.instance_half(x[:, : self.split]), self.batch_half(x[:, self.split :])), dim=1)


def first_norms(model: nn.Module) -> list[nn.Module]:
    """Return the first batch norm of every block in stages 1 to 3 of a ResNet; empty for other networks."""
    stages = [module for path, module in model.named_modules() if path.rpartition(".")[2] in RESNET_STAGES]
    blocks = [block for stage in stages for block in stage.children()]
    firsts = [next((m for m in block.modules() if isinstance(m, BatchNorm)), None) for block in blocks]
    return [norm for norm in firsts if norm is not None]


@dataclass(frozen=True)
class ToIBN(Part):
    """Split the batch norms at the selected places."""

    where: str | tuple[str, ...]
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        candidates: dict[str, nn.Module] = {
            path: m for path, m in model.named_modules() if isinstance(m, MAPS) and m.num_features > 1 and path
        }
        if not candidates:
            raise ModelError(
                f"ibn: {type(model).__name__} has no batch norm of feature maps to split. Use a model with batch norm."
            )
        chosen = self.chosen(model, candidates)
        replace_modules(model, chosen.__contains__, lambda norm: IBN(plain_batch_norm(norm, "ibn")))
        return model

    def chosen(self, model: nn.Module, candidates: dict[str, nn.Module]) -> set[nn.Module]:
        if self.where != "auto":
            return set(modules_at(model, self.where, candidates, "ibn"))
        if "layer1" in stages_of(model) and (firsts := first_norms(model)):
            return set(firsts)
        return set(list(candidates.values())[: math.ceil(len(candidates) / 2)])


@register
def ibn(where: str | tuple[str, ...] = "auto") -> Method:
    """Split shallow batch norms: half instance norm, half batch norm.

        y = [ IN(x[: C/2]), BN(x[C/2 :]) ]        for the first norm of each residual block in stages 1, 2 and 3

    Args:
        where: auto (first norm of each block in stages 1 to 3 of a ResNet, otherwise the first half of the batch norms), all, a
        stage, or a list of stages or name patterns, in which all batch norms are split.

    Reference:
        X. Pan et al. Two at Once: Enhancing Learning and Generalization Capacities via IBN-Net. ECCV 2018.
    """
    places_named(where, "ibn")
    return Method("ibn", surgery=(ToIBN(where),), standalone=False, facts=Facts(batch_norm=True))
