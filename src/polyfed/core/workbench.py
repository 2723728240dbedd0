"""The workbench: the one resident model of a process, into which clients are swapped, and what a client keeps between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyfed.core.batch_norm import batch_norms_of
from polyfed.core.data_types import Preparation
from polyfed.core.device import CPU, lay_channels_last
from polyfed.core.part import declared
from polyfed.core.tasks.known import CLASSIFICATION
from polyfed.core.tasks.task import Task
from polyfed.errors import ModelError

if TYPE_CHECKING:
    from polyfed.core.client import Client
    from polyfed.core.method import Method
    from polyfed.core.sharing import Plan
    from polyfed.core.tasks.task import TaskScores
    from polyfed.settings import Settings


PIXELS_OF_A_TEST_BATCH = 256 * 96 * 96
"""At 224 pixels a test batch has 47 images; of 256, each of the first maps of a ResNet-18 would have 0.8 GB."""


@dataclass
class Workbench:
    """The one resident model of a process, into which clients are swapped by copying only what differs."""

    model: nn.Module
    method: Method
    plan: Plan
    settings: Settings
    preparation: Preparation
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int
    head: str | None = None
    checks_each_step: bool = False
    initial: dict[str, Tensor] = field(default_factory=dict)
    device: torch.device = CPU
    task: Task = CLASSIFICATION
    input_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.live: dict[str, Tensor] = dict(self.model.state_dict(keep_vars=True))
        if not self.initial:
            self.initial = {name: value.detach().clone() for name, value in self.live.items()}
        if self.device != CPU:
            self.model.to(self.device)
            self.live = dict(self.model.state_dict(keep_vars=True))
        if self.settings.layout == "channels_last":
            self.model.register_forward_pre_hook(lay_channels_last)
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        inside = "" if self.head is None else f"{self.head}."
        self.head_entries = {name: name.removeprefix(inside) for name in self.live if inside and name.startswith(inside)}
        """The entries inside the head, each with its name there."""
        self.batch_norms = batch_norms_of(self.model)
        hooks = (*self.method.objective, *self.method.gradients, self.method.task_loss)
        self.wants_features = any(declared(hook).needs_features for hook in hooks)
        self.own_step: Callable[[Client, int, Tensor, Tensor], Tensor] | None = None
        """Takes a training step in the place of the client's own way (compiled steps)."""
        self.own_optimizer: Callable[..., torch.optim.Optimizer] | None = None
        """Makes a client's optimizer from its parameters and ``lr``, where the user gave one in Python."""
        self.own_schedule: Callable[[int, int], float] | None = None
        """The factor on the learning rate from a round and the number of rounds, where the user gave one in Python."""
        self.measure: str = self.task.main_measure
        """The metric by which the run chooses its round; the run sets it before round 1."""
        self.answers: dict[tuple[str, str, str], Mapping[str, Tensor]] | None = None
        """The answers of the last evaluation by view, client and domain, where this process notes them. They never travel."""

    def note_answers(self, view: str, client: str, domain: str, scores: TaskScores) -> None:
        """Note the answer for each image, where somebody in this process wants them."""
        if self.answers is not None and scores.in_detail and (answers := scores.answers()):
            self.answers[view, client, domain] = answers

    @property
    def test_batch_size(self) -> int:
        """Samples in a test batch: as the settings say, and of large images fewer, so that what layers make of a batch stays bounded."""
        height_and_width = self.input_shape[1:]
        return min(self.settings.test_batch_size, max(1, PIXELS_OF_A_TEST_BATCH // math.prod(height_and_width)))

    @torch.no_grad()
    def load(self, entries: Mapping[str, Tensor]) -> None:
        for name, value in entries.items():
            self.live[name].copy_(value)

    @property
    def head_module(self) -> nn.Module:
        return self.model.get_submodule(self.require_head("This method"))

    def require_head(self, what: str) -> str:
        """The path of the head; where it is in doubt, an error that says what needs it."""
        if self.head is None:
            raise ModelError(f"{what} needs the model's head, which is in doubt. Name it with --head NAME.")
        return self.head


@dataclass
class ClientState:
    """What a client keeps between rounds: local entries, and memory (tensors, numbers, text)."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


def forward_with_features(bench: Workbench, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the input of the head that made them."""
    caught: list[Tensor] = []
    hook = bench.head_module.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        logits = bench.model(x)
    finally:
        hook.remove()
    return logits, caught[-1]


def features_or_outputs(bench: Workbench, x: Tensor) -> Tensor:
    """A flat vector for each input: the input of the head, or, where the head is in doubt, what the model gives."""
    return (bench.model(x) if bench.head is None else forward_with_features(bench, x)[1]).flatten(1)
