"""FedSR: a simple probabilistic representation. Differences from the paper: docs/methods/fedsr.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.client import Step
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.seeds import generator
from polyfed.core.sharing import Select, keep_local
from polyfed.errors import ModelError, OptionError

CLASS_REFERENCE = "class_reference"
NAME = "fedsr"
references = Select("class references", kinds=frozenset({CLASS_REFERENCE}))


class Representation(nn.Module):
    """Layer before the head: a Gaussian for each sample, and the class references for comparison.

    ``drawn`` contains mean, spread and sample of the last training batch until an objective takes them. If ``noise`` is set, for
    prediction, ``forward`` returns one block of samples after the other.
    """

    entry_kinds: ClassVar[dict[str, str]] = dict.fromkeys(("class_mean", "class_spread", "scale"), CLASS_REFERENCE)

    def __init__(self, inputs: int, width: int, classes: int, records: bool) -> None:
        super().__init__()
        self.width, self.records = width, records
        self.layer = nn.Linear(inputs, 2 * width)
        self.class_mean = nn.Parameter(torch.zeros(classes, width))
        self.class_spread = nn.Parameter(torch.ones(classes, width))
        self.scale = nn.Parameter(torch.ones(()))
        self.drawn: tuple[Tensor, Tensor, Tensor] | None = None
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return a sample in training, the mean in evaluation, and several samples in prediction."""
        both: Tensor = self.layer(x)
        mean, raw = both[:, : self.width], both[:, self.width :]
        if self.noise is not None:
            return (mean + F.softplus(raw) * self.noise.to(mean).unsqueeze(1)).flatten(0, 1)
        if not self.training:
            return mean
        spread = F.softplus(raw)
        sample = mean + spread * torch.randn_like(mean)
        if self.records:
            self.drawn = (mean, spread, sample)
        return sample

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, spread and sample of the last training batch, and drop the references, which keep its graph in memory."""
        drawn, self.drawn = self.drawn, None
        assert drawn is not None
        return drawn


class Before:
    """Forward pre-hooks that insert the representation before the head, once per pass of the model.

    If a part calls only the head (guiding, rsc), its input is already a representation and is not converted again.
    """

    def __init__(self, representation: Representation) -> None:
        self.representation = representation
        self.due = False

    def begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.due = True

    def __call__(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.due:
            return None
        self.due = False
        return (self.representation(inputs[0]),)


@dataclass(frozen=True)
class PutRepresentation(Part):
    """Insert the probabilistic layer before the head."""

    width: int
    records: bool
    stage = "features"
    commutes = True
    needs_head = True

    def __call__(self, model: nn.Module, path: str) -> nn.Module:
        parent, _, own = path.rpartition(".")
        holder, head = model.get_submodule(parent), model.get_submodule(path)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"fedsr: {type(model).__name__} needs a linear layer as its head, got {type(head).__name__}. Use a model that ends with one."
            )
        width = self.width or head.in_features
        made = Representation(head.in_features, width, head.out_features, self.records).to(head.weight)
        if width != head.in_features:
            head = nn.Linear(width, head.out_features, head.bias is not None).to(head.weight)
            setattr(holder, own, head)
        if isinstance(holder, nn.Sequential):
            items = list(holder._modules.items())
            place = [key for key, _ in items].index(own)
            holder._modules.clear()
            holder._modules.update([*items[:place], (NAME, made), *items[place:]])
        else:
            holder.add_module(NAME, made)
            before = Before(made)
            model.register_forward_pre_hook(before.begin)
            head.register_forward_pre_hook(before)
        return model


def representation_of(model: nn.Module) -> Representation:
    return next(module for module in model.modules() if isinstance(module, Representation))


def divergence(mean: Tensor, spread: Tensor, other_mean: Tensor, other_spread: Tensor) -> Tensor:
    """Return KL(N(mean, spread^2) || N(other_mean, other_spread^2)), summed over dimensions."""
    ratio = (spread.square() + (mean - other_mean).square()) / (2 * other_spread.square())
    return ((other_spread / spread).log() + ratio - 0.5).sum(dim=1)


@dataclass(frozen=True)
class Simple(Part):
    """Add the two regularisers of the representation."""

    l2r: float
    cmi: float
    squared: bool

    def __call__(self, step: Step) -> Tensor:
        layer = representation_of(step.client.model)
        mean, spread, sample = layer.taken()
        tiny = torch.finfo(mean.dtype).tiny
        total = torch.zeros((), dtype=mean.dtype, device=mean.device)
        if self.l2r:
            lengths = sample.square().sum(dim=1) if self.squared else torch.linalg.vector_norm(sample, dim=1)
            total = total + self.l2r * lengths.mean()
        if self.cmi:
            scaled = (layer.scale.abs() * spread).clamp_min(tiny)
            reference = F.softplus(layer.class_spread[step.y])
            total = total + self.cmi * divergence(layer.scale * mean, scaled, layer.class_mean[step.y], reference).mean()
        return total


@dataclass(frozen=True)
class MeanOfSamples(Part):
    """Average probabilities over samples of the representation; the network before it runs once."""

    samples: int

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        layer = representation_of(model)
        layer.noise = torch.randn(self.samples, layer.width, generator=generator(0, NAME, "samples"))
        try:
            logits: Tensor = model(x)
        finally:
            layer.noise = None
        return logits.view(self.samples, len(x), -1).softmax(dim=2).mean(dim=0)


@register(shows=("l2r", "cmi"))
def fedsr(l2r: float = 0.01, cmi: float = 0.001, squared: bool = False, width: int = 0, samples: int = 20) -> Method:
    """Learn a simple probabilistic representation: of small norm, and no more informative about the input than the label.

        (mu, s) = layer(g(x)),  sigma = softplus(s),  z = mu + sigma * eps,  logits = h(z)        one sample of eps in training
        loss = l(h(z), y) + l2r * mean_i ||z_i||
             + cmi * mean_i KL( N(C mu_i, (C sigma_i)^2) || N(r_mu[y_i], softplus(r_sigma[y_i])^2) )

    Args:
        l2r: weight of the norm of the representation.
        cmi: weight of the divergence from the class references (conditional mutual information).
        squared: use the squared norm.
        width: dimensions of the representation; 0: those of the head's input.
        samples: samples of the representation per prediction.

    Reference:
        A. T. Nguyen et al. FedSR: A Simple and Effective Domain Generalization Method for Federated Learning. NeurIPS 2022.
    """
    if l2r < 0 or cmi < 0 or width < 0 or samples < 1:
        raise OptionError(
            f"fedsr: l2r, cmi and width must not be negative and samples at least 1, got l2r={l2r}, cmi={cmi}, width={width}, samples={samples}."
        )
    regularised = bool(l2r or cmi)
    return Method(
        NAME,
        surgery=(PutRepresentation(width, regularised),),
        objective=(Simple(l2r, cmi, squared),) if regularised else (),
        predict=MeanOfSamples(samples),
        sharing=(keep_local(references),),
        facts=Facts(
            class_labels=True,
            client_state=True,
            extra_work=f"one wide layer, two terms per step, {samples} head passes per prediction",
        ),
    )
