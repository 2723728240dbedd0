"""The workbench: the one resident model of a process, into which clients are swapped; its device and memory, and what a client keeps.

Untested on a GPU: the machines this was written on have none. The same code is exercised on the CPU and on torch's ``meta`` device.

Freed memory: steps on large images free and ask for blocks of some hundred megabytes, and what outlives a step lies between them. The
gaps that are left fit the next client's blocks less and less, so a process would grow with every client. So much freed memory that the C
library keeps goes back to the system between two clients; within a client's training nothing does, since its next step needs the same blocks.

Optimizers: the methods of torch's own are wrapped, so that its compiler keeps out of them; the wrappers import the compiler for that, more
than a thousand modules and a third of the time to the first finished round. Nothing in polyfed compiles an optimizer (compiled.py
traces SGD by itself), so the methods underneath the wrappers are used. Results are not touched by either.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from polyfed.core.data_types import Preparation
from polyfed.core.entries import batch_norms_of
from polyfed.core.part import declared
from polyfed.errors import ModelError, SettingError
from polyfed.settings import Settings
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.task import Task
from polyfed.trees import map_tensors, tree_digest

if TYPE_CHECKING:
    from polyfed.core.client import Client
    from polyfed.core.method import Method
    from polyfed.core.sharing import Plan
    from polyfed.tasks.task import TaskScores


T = TypeVar("T")
CPU = torch.device("cpu")
PRECISIONS = {"bfloat16": torch.bfloat16}


def chosen_device(text: str) -> torch.device:
    """The device of a setting; one that this machine has not is an error that names what it has."""
    if text == "auto":
        return torch.device(present_devices()[0])
    device = torch.device(text)
    if device.type not in (*present_devices(), "meta"):
        raise SettingError(f"--device {text}: this machine has {', '.join(present_devices())}. Use one of these, or auto.")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise SettingError(f"--device {text}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return device


def present_devices() -> list[str]:
    """The kinds of devices of this machine, the fastest first."""
    found = ["cuda"] if torch.cuda.is_available() else []
    found += ["mps"] if torch.backends.mps.is_available() else []
    return [*found, "cpu"]


def moved(tree: T, device: torch.device) -> T:
    """Plain values and tensors with every tensor on the device; what is there already is not copied."""
    return map_tensors(tree, lambda tensor: tensor.to(device))


def sent_to(batch: Tensor, device: torch.device) -> Tensor:
    """A batch on the device, copied from pinned memory while earlier steps still run."""
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=device.type == "cuda")


def precision(amp: str, device: torch.device) -> AbstractContextManager[Any]:
    """Inside the block, operations that allow it run in the precision of the setting. Values and gradients stay in float32."""
    return nullcontext() if amp == "off" else torch.autocast(device.type, PRECISIONS[amp])


def lay_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a model's forward pass: images with their channels side by side. Layers hand this layout on; parameters keep theirs."""
    images = [isinstance(x, Tensor) and x.dim() == 4 for x in inputs]
    return tuple(x.contiguous(memory_format=torch.channels_last) if image else x for x, image in zip(inputs, images, strict=True))


MUCH = 256 << 20
"""Bytes that are kept without asking: they come back page by page, which a small step would feel."""


class _HeapFacts(ctypes.Structure):
    """What ``mallinfo2`` of the GNU C library tells, in its order."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keepcost")
    ]


@cache
def _library() -> Any:
    """The C library of Linux; None elsewhere, where it cannot be asked for in this way."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapFacts
    return library


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_much() -> bool:
    """Give freed memory back if it is much; returns whether it was. Other C libraries than GNU's are left alone."""
    heap = getattr(_library(), "mallinfo2", None)
    if heap is None or heap().free < MUCH:
        return False
    give_back()
    return True


def unwrapped(kind: type[Optimizer]) -> type[Optimizer]:
    """The same optimizer, whose methods are those underneath the wrappers."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": unwrapped(SGD), "adam": unwrapped(Adam), "adamw": unwrapped(AdamW)}


def make_optimizer(settings: Settings, parameters: Iterable[torch.nn.Parameter], lr: float) -> Optimizer:
    momentum = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    return OPTIMIZERS[settings.optimizer](parameters, lr=lr, weight_decay=settings.weight_decay, **momentum)


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


def client_digest(state: ClientState) -> str:
    return tree_digest({"entries": dict(sorted(state.entries.items())), "memory": state.memory})
