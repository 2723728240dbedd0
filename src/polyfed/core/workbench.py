"""The workbench: the resident model of a process, its device and memory, and the client state that is swapped in.

GPU code is untested. The same code runs in tests on the CPU and on torch's ``meta`` device.

Freed memory: steps on large images allocate and free blocks of several hundred megabytes. Fragmentation would let a process grow with every
client, so large amounts of freed memory are returned to the system between clients. Within a client's training nothing is returned, since
the next step needs the same blocks.

Optimizers: torch wraps the methods of its optimizers to keep the compiler out of them. The wrappers import the compiler (over a
thousand modules). polyfed does not compile optimizers (compiled.py traces SGD itself), so it uses the unwrapped methods. Results are the same.
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
    """Return the device of a setting. Raise ``SettingError`` if this machine does not have it."""
    if text == "auto":
        return torch.device(present_devices()[0])
    device = torch.device(text)
    if device.type not in (*present_devices(), "meta"):
        raise SettingError(f"--device {text}: this machine has {', '.join(present_devices())}. Use one of these, or auto.")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise SettingError(f"--device {text}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return device


def present_devices() -> list[str]:
    """Return the device types of this machine, fastest first."""
    found = ["cuda"] if torch.cuda.is_available() else []
    found += ["mps"] if torch.backends.mps.is_available() else []
    return [*found, "cpu"]


def moved(tree: T, device: torch.device) -> T:
    """Move all tensors of a tree to the device. Tensors that are already on it are not copied."""
    return map_tensors(tree, lambda tensor: tensor.to(device))


def sent_to(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to the device, asynchronously from pinned memory on CUDA."""
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=device.type == "cuda")


def precision(amp: str, device: torch.device) -> AbstractContextManager[Any]:
    """Use the given precision inside the block for operations that allow it. Values and gradients stay in float32."""
    return nullcontext() if amp == "off" else torch.autocast(device.type, PRECISIONS[amp])


def lay_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert images to the channels-last layout before a forward pass. Layers preserve it; parameters are not converted."""
    images = [isinstance(x, Tensor) and x.dim() == 4 for x in inputs]
    return tuple(x.contiguous(memory_format=torch.channels_last) if image else x for x, image in zip(inputs, images, strict=True))


MUCH = 256 << 20
"""Freed bytes to keep, because small steps would otherwise get them back page by page, which is slow."""


class _HeapFacts(ctypes.Structure):
    """Result of ``mallinfo2`` of the GNU C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keepcost")
    ]


@cache
def _library() -> Any:
    """Return the C library on Linux, otherwise None."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapFacts
    return library


def give_back() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_much() -> bool:
    """Return freed memory to the system if it exceeds ``MUCH`` (GNU C library only); the result is True if it did."""
    heap = getattr(_library(), "mallinfo2", None)
    if heap is None or heap().free < MUCH:
        return False
    give_back()
    return True


def unwrapped(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the same optimizer class with unwrapped methods."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": unwrapped(SGD), "adam": unwrapped(Adam), "adamw": unwrapped(AdamW)}


def make_optimizer(settings: Settings, parameters: Iterable[torch.nn.Parameter], lr: float) -> Optimizer:
    momentum = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    return OPTIMIZERS[settings.optimizer](parameters, lr=lr, weight_decay=settings.weight_decay, **momentum)


PIXELS_OF_A_TEST_BATCH = 256 * 96 * 96
"""Limits a test batch to 47 images at 224 pixels. With 256, each of the first feature maps of a ResNet-18 would take 0.8 GB."""


@dataclass
class Workbench:
    """Resident model of a process. Clients are swapped in by copying only the values that differ."""

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
        """Entries inside the head, with their name relative to it."""
        self.batch_norms = batch_norms_of(self.model)
        hooks = (*self.method.objective, *self.method.gradients, self.method.task_loss)
        self.wants_features = any(declared(hook).needs_features for hook in hooks)
        self.own_step: Callable[[Client, int, Tensor, Tensor], Tensor] | None = None
        """Replaces ``Client.train_on`` (compiled steps)."""
        self.own_optimizer: Callable[..., torch.optim.Optimizer] | None = None
        """User-supplied factory of a client's optimizer, from its parameters and ``lr``."""
        self.own_schedule: Callable[[int, int], float] | None = None
        """User-supplied factor on the learning rate, from the round and the number of rounds."""
        self.uses_objects = False
        """True if objects given in Python replace the optimizer, loss, schedule or augmentation."""
        self.measure: str = self.task.main_measure
        """Metric that selects the best round. The run sets it before round 1."""
        self.answers: dict[tuple[str, str, str], Mapping[str, Tensor]] | None = None
        """Predictions of the last evaluation by view, client and domain, if this process records them. They are never sent."""

    def note_answers(self, view: str, client: str, domain: str, scores: TaskScores) -> None:
        """Record the prediction for each example, if this process records them."""
        if self.answers is not None and scores.in_detail and (answers := scores.answers()):
            self.answers[view, client, domain] = answers

    @property
    def test_batch_size(self) -> int:
        """Samples in a test batch: the setting, reduced for large images to bound the memory."""
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
        """Return the path of the head. Raise ``ModelError`` if it could not be detected."""
        if self.head is None:
            raise ModelError(f"{what} needs the model's output layer, which could not be detected. Specify it with --head NAME.")
        return self.head


@dataclass
class ClientState:
    """State that a client keeps between rounds: local entries, and memory (tensors, numbers, text)."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


def forward_with_features(bench: Workbench, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the input of the head."""
    caught: list[Tensor] = []
    hook = bench.head_module.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        logits = bench.model(x)
    finally:
        hook.remove()
    return logits, caught[-1]


def features_or_outputs(bench: Workbench, x: Tensor) -> Tensor:
    """Return a flat vector per input: the input of the head, or the model's output if the head could not be detected."""
    return (bench.model(x) if bench.head is None else forward_with_features(bench, x)[1]).flatten(1)


def client_digest(state: ClientState) -> str:
    return tree_digest({"entries": dict(sorted(state.entries.items())), "memory": state.memory})
