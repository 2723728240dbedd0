"""XAN: instance norm and batch norm side by side, their outputs mixed by two learnt scores.

    y = w_in * IN(x) + w_bn * BN(x),   (w_in, w_bn) = softmax(score_in, score_bn)

Each side has an affine of its own.
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyfed.core.batch_norm import BatchNorm
from polyfed.core.entries import MIX
from polyfed.errors import ModelError
from polyfed.layers.choose_layers import Where, modules_at, plain_batch_norm
from polyfed.layers.norms import InstanceNorm
from polyfed.layers.replace_modules import replace_modules


class XAN(nn.Module):
    """A batch norm with an instance norm next to it.

    The batch norm is taken over as it is, so pretrained affine and statistics are kept. ``in_init`` is what the affine of the instance norm
    starts from: ``copy_bn`` or ``ones``. A map of one position has no spread, so the instance norm is undefined there: ``tiny_maps="error"``
    says so, ``"skip"`` uses only the batch norm on such maps.
    """

    entry_kinds: ClassVar[dict[str, str]] = {"score_in": MIX, "score_bn": MIX}

    def __init__(
        self,
        norm: BatchNorm,
        in_init: str = "copy_bn",
        instance_score: float = 1.0,
        tiny_maps: str = "error",
    ) -> None:
        super().__init__()
        self.tiny_maps = tiny_maps
        self.batch_side = norm
        anchor = next(itertools.chain(norm.parameters(), norm.buffers()), torch.empty(0))
        self.instance_side = InstanceNorm(norm.num_features, norm.eps).to(anchor)
        if in_init == "copy_bn" and norm.affine:
            self.instance_side.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        self.score_in = nn.Parameter(anchor.new_tensor(float(instance_score)))
        self.score_bn = nn.Parameter(anchor.new_tensor(1.0))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """The mixed outputs."""
        batch: Tensor = self.batch_side(x)
        if math.prod(x.shape[2:]) == 1:
            return self._on_one_position(batch)
        instance_share, batch_share = torch.stack((self.score_in, self.score_bn)).softmax(dim=0).unbind()
        instance: Tensor = self.instance_side(x)
        return instance_share * instance + batch_share * batch

    def _on_one_position(self, batch: Tensor) -> Tensor:
        if self.tiny_maps == "skip":
            return batch
        raise ModelError(
            f"XAN: the map has one position per channel (shape {tuple(batch.shape[1:])}), so its instance norm is undefined there. "
            'Use larger inputs, other places (where=...), or tiny_maps="skip".'
        )


def put_xan(
    model: nn.Module,
    where: Where = "all",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
    part: str = "xan",
) -> nn.Module:
    """Replace the batch norms of maps at some places by XAN, in place.

    Batch norms of vectors (``BatchNorm1d``) have no positions for an instance norm and are left as they are.
    """
    maps = (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    candidates = {path: module for path, module in model.named_modules() if isinstance(module, maps)}
    if not candidates:
        raise ModelError(
            f"{part}: {type(model).__name__} has no batch norm of maps to replace. Use a model with batch norm, or leave {part} out."
        )
    chosen = set(modules_at(model, where, candidates, part))

    def make(norm: nn.Module) -> nn.Module:
        return XAN(plain_batch_norm(norm, part), in_init, instance_score, tiny_maps)

    if model in chosen:
        return make(model)
    replace_modules(model, chosen.__contains__, make)
    return model
