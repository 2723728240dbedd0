"""The optimizers of clients: torch's own arithmetic, without importing torch's compiler.

The methods of torch's optimizers are wrapped, so that its compiler keeps out of them; the wrappers import the compiler for that, more
than a thousand modules and a third of the time to the first finished round. Nothing in polyfed compiles an optimizer (compiled.py
traces SGD by itself), so the methods underneath the wrappers are used. Results are not touched by this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from polyfed.settings import Settings


def unwrapped(kind: type[Optimizer]) -> type[Optimizer]:
    """The same optimizer, whose methods are those underneath the wrappers."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": unwrapped(SGD), "adam": unwrapped(Adam), "adamw": unwrapped(AdamW)}


def make_optimizer(settings: Settings, parameters: Iterable[torch.nn.Parameter], lr: float) -> Optimizer:
    momentum = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    return OPTIMIZERS[settings.optimizer](parameters, lr=lr, weight_decay=settings.weight_decay, **momentum)
