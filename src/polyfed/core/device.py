"""Where models are trained: which device, in which precision and layout, and how tensors get there and back.

Untested on a GPU: the machines this was written on have none. The same code is exercised on the CPU and on torch's ``meta`` device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyfed.core.trees import map_tensors
from polyfed.errors import SettingError

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
