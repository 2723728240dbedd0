"""PerXAN and gPerXAN: shared instance norm, personal batch norm. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from polyfed.core.entries import MIX
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.sharing import Rule, Select, batch_norm, upload_only
from polyfed.errors import OptionError
from polyfed.methods._shared import require_choice
from polyfed.methods.guiding import Guide
from polyfed.models.layers.norms import put_xan
from polyfed.models.layers.surgery import Where, places_named

# The names below are attributes of polyfed's XAN layer, so names in a user's model have no effect.
batch_sides = Select("batch side of XAN", layers=frozenset({"batch_norm"}), names=("*batch_side.*",))
MIXING: dict[str, tuple[Rule, ...]] = {
    "bn_only": (upload_only(Select("batch score of XAN", frozenset({MIX}), frozenset({"xan"}), ("*score_bn",))),),
    "both": (upload_only(Select("scores of XAN", frozenset({MIX}), frozenset({"xan"}))),),
    "none": (),
}
CHOICES = {
    "rest": ("local", "shared"),
    "mix_local": tuple(MIXING),
    "in_init": ("copy_bn", "ones"),
    "tiny_maps": ("error", "skip"),
}
XAN_OPTIONS: Mapping[str, str] = {
    "where": "all, first_two (ResNet), first_dense (DenseNet), a stage, or a list of stages or name patterns.",
    "rest": "batch norms that are not replaced: local or shared.",
    "mix_local": "local scores: bn_only, both or none.",
    "in_init": "initial affine of instance norm: copy_bn or ones.",
    "instance_score": "initial score of the instance side; that of the batch side is 1.",
    "tiny_maps": "feature maps with one position, for which instance norm is undefined: error or skip.",
}


@dataclass(frozen=True)
class ToXAN(Part):
    """Replace the batch norms at the selected places by XAN. From Python, ``where`` may be a predicate of path and module."""

    where: Where = "all"
    in_init: str = "copy_bn"
    instance_score: float = 1.0
    tiny_maps: str = "error"
    part: str = "perxan"
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return put_xan(model, self.where, self.in_init, self.instance_score, self.tiny_maps, self.part)


def assembled(
    name: str, where: str | tuple[str, ...], rest: str, mix_local: str, in_init: str, instance_score: float, tiny_maps: str
) -> Method:
    """Return the named method: XAN at the selected places, with the batch side uploaded but never sent back."""
    for option, value in {"rest": rest, "mix_local": mix_local, "in_init": in_init, "tiny_maps": tiny_maps}.items():
        require_choice(name, option, value, CHOICES[option])
    places_named(where, name)
    return Method(
        name,
        surgery=(ToXAN(where, in_init, instance_score, tiny_maps, name),),
        sharing=(upload_only(batch_norm if rest == "local" else batch_sides), *MIXING[mix_local]),
        facts=Facts(batch_norm=True, client_state=True, extra_work="one instance norm per replaced batch norm"),
    )


@register(shared_options=XAN_OPTIONS)
def perxan(
    where: str | tuple[str, ...] = "all",
    rest: str = "local",
    mix_local: str = "bn_only",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
) -> Method:
    """Mix instance norm and batch norm; share the instance side, keep the batch side local.

        XAN(x) = w_in * IN(x) + w_bn * BN(x),   (w_in, w_bn) = softmax(score_in, score_bn)

    Reference:
        K. Le et al. Efficiently Assemble Normalization Layers and Regularization for Federated Domain Generalization. CVPR
        2024.
    """
    return assembled("perxan", where, rest, mix_local, in_init, instance_score, tiny_maps)


@register(shared_options=XAN_OPTIONS)
def gperxan(  # noqa: D417 (the other options: XAN_OPTIONS)
    guide: float = 0.5,
    where: str | tuple[str, ...] = "all",
    rest: str = "local",
    mix_local: str = "bn_only",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
) -> Method:
    """PerXAN with features guided by the classifier from the server.

        XAN(x) = w_in * IN(x) + w_bn * BN(x),   (w_in, w_bn) = softmax(score_in, score_bn)
        loss_i = l(h_i(g_i(x)), y) + guide * l(h_received(g_i(x)), y)

    Args:
        guide: weight of the guiding loss; 0 is perxan.

    Reference:
        K. Le, L. Ho, C. Do, D. Le-Phuoc and K.-S. Wong. Efficiently Assemble Normalization Layers and Regularization for
        Federated Domain Generalization. CVPR 2024.
    """
    if guide < 0:
        raise OptionError(f"gperxan: guide must not be negative, got {guide}.")
    base = assembled("gperxan", where, rest, mix_local, in_init, instance_score, tiny_maps)
    work = f"{base.facts.extra_work}; one more head pass per step"
    return (
        replace(base, objective=(Guide(guide),), facts=replace(base.facts, class_labels=True, extra_work=work)) if guide else base
    )
