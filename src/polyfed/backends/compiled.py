"""Compiled steps: forward, loss, backward, the method's rules and the update of SGD as one program, made by torch's compiler.

A step is first run once under a tracer, through the same code as ever, so that whatever a method does is in the program. A trace would
freeze the number of the step or of the round, so a method whose parts look at them in a step is not compiled. Compiled
programs lie in a folder of the user's cache and are used again by later runs. They round differently in the last bits.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from polyfed.backends.stacked import Rows, Single, Stack
from polyfed.core.client import Client
from polyfed.core.slots import ONE_BY_ONE
from polyfed.core.workbench import Workbench
from polyfed.errors import ClientFailure, SettingError

log = logging.getLogger("polyfed")

FOLDER = "POLYFED_COMPILED"
MAX_PROGRAMS = 4
STEPS_TO_WARM_UP = 2
SECONDS_TO_COMPILE, SHARE_SAVED = 60.0, 0.2
MOMENTUM = "momentum_buffer"

Program: TypeAlias = Callable[..., Tensor]


def cache_folder() -> Path:
    """Where compiled programs lie between runs."""
    named = os.environ.get(FOLDER)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "polyfed" / "compiled"


def why_no_compiler() -> str:
    """Why nothing can be compiled on this machine; empty when it can."""
    if os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"):
        return ""
    return "there is no C++ compiler (g++ or clang++) on this machine"


def compiled_steps(bench: Workbench) -> Compiled | None:
    """Let the bench take its steps compiled, where the settings ask for it."""
    if bench.settings.compile == "off":
        return None
    own = next((slot for slot in ONE_BY_ONE if bench.method.fills(slot)), None)
    if own is not None:
        if bench.settings.compile == "on":
            raise SettingError(f"--compile on: {bench.method} decides the {own.replace('_', ' ')} itself. Use --compile off.")
        return None
    steps = Compiled(bench)
    bench.own_step = steps.step_of_client
    return steps


class Compiled:
    """Takes the steps of clients, or of stacks of them, with compiled programs.

    ``auto`` measures the steps of the first round and compiles only where the steps that are planned repay it.
    """

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.demanded = bench, bench.settings.compile == "on"
        self.programs: dict[Any, Traced | None] = {}
        self.spent: list[float] = []
        self.round = 0
        self.given_up = ""
        self.single: Single | None = None
        reason = why_no_compiler()
        if reason and self.demanded:
            raise SettingError(f"--compile on: {reason}. Install one, or use --compile off.")
        if reason:
            self.give_up(reason)
        elif self.demanded:
            importlib.import_module("torch._dynamo")  # a thousand modules: once here, not once in every worker process

    def give_up(self, reason: str) -> None:
        """Go on uncompiled, and say so once."""
        self.given_up = reason
        log.info("Steps are not compiled: %s.", reason)

    def step_of_client(self, client: Client, index: int, x: Tensor, y: Tensor) -> Tensor:
        return self.taken(client.round, lambda: self.single_of(client), lambda: client.train_on(index, x, y), index, x, y)

    def single_of(self, client: Client) -> Single:
        """The tensors of a client that trains by itself; the same object for all steps of a round."""
        if self.single is None or self.single.client is not client:
            self.single = Single(client)
        return self.single

    def step_of_stack(self, stack: Stack, index: int, x: Tensor, y: Tensor) -> Tensor:
        return self.taken(stack.like.round, lambda: stack, lambda: stack.train_on(index, x, y), index, x, y)

    def taken(
        self, number: int, rows: Callable[[], Rows], plainly: Callable[[], Tensor], index: int, x: Tensor, y: Tensor
    ) -> Tensor:
        """A step, compiled where it can be and pays."""
        if self.given_up:
            return plainly()
        if not self.demanded and not self.pays(number):
            began = time.perf_counter()
            losses = plainly()
            self.spent.append(time.perf_counter() - began)
            return losses
        made = rows()
        traced = self.program(made, index, x, y)
        return plainly() if traced is None else traced.run(made, index, x, y)

    def pays(self, number: int) -> bool:
        """Whether the planned steps repay compiling, judged after the first round by those that were taken in it."""
        if self.programs:
            return True
        self.round = self.round or number
        if number == self.round:
            return False
        measured = sorted(self.spent[STEPS_TO_WARM_UP:] or self.spent)
        planned = measured[len(measured) // 2] * len(self.spent) * (self.bench.settings.rounds - number + 1)
        if planned * SHARE_SAVED < SECONDS_TO_COMPILE:
            self.give_up(
                f"the {planned:.0f} s of steps that are planned would not repay about {SECONDS_TO_COMPILE:.0f} s of compiling"
            )
            return False
        return True

    def program(self, rows: Rows, index: int, x: Tensor, y: Tensor) -> Traced | None:
        """The program for tensors of these shapes; None where such steps are better not compiled."""
        key = (rows.key, tuple(x.shape), x.dtype, tuple(y.shape))
        if key in self.programs:
            return self.programs[key]
        if len(self.programs) >= MAX_PROGRAMS:
            if len(self.programs) == MAX_PROGRAMS:
                log.info("Steps of further shapes are not compiled: there are %d programs already.", MAX_PROGRAMS)
            self.programs[key] = None
            return None
        began = time.perf_counter()
        try:
            self.programs[key] = traced = ready(rows, index, x, y)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if self.demanded:
                raise ClientFailure(
                    f"--compile on: the training step of {self.bench.method} cannot be compiled: {reason}. Use --compile off."
                ) from error
            self.programs[key] = None
            self.give_up(f"the training step of {self.bench.method} cannot be ({reason})")
            return None
        seconds = time.perf_counter() - began
        log.info("Compiled a training step for batches of %s in %.1f s; its last bits differ.", tuple(x.shape), seconds)
        return traced


def ready(rows: Rows, index: int, x: Tensor, y: Tensor) -> Traced:
    """A compiled step: the whole of it, or else all but the method's rules for gradients and the update."""
    try:
        whole = Traced(rows, index, x, y, whole=True)
        whole.warm_up(rows, x, y)
    except Exception as error:
        if not rows.bench.method.gradients:
            raise
        log.info("The rules for gradients of %s are not compiled (%s); the rest is.", rows.bench.method, type(error).__name__)
    else:
        return whole
    part = Traced(rows, index, x, y, whole=False)
    part.warm_up(rows, x, y)
    return part


class Traced:
    """A training step as a program of torch's operations, compiled."""

    def __init__(self, rows: Rows, index: int, x: Tensor, y: Tensor, whole: bool) -> None:
        settings = rows.bench.settings
        self.whole = whole
        self.updates = whole and settings.optimizer == "sgd"
        self.momentum, self.decay = settings.momentum, settings.weight_decay
        self.trained: list[str] = []
        with rows.timeless():
            graph = self.trace(rows, index, x, y)
        self.compiled: Program = prepared_compiler(settings.threads)(graph)

    def inputs(self, rows: Rows, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        """Everything the program reads, as a flat list of tensors."""
        values = {name: value.detach() for name, value in rows.parameters.items()}
        others = {name: value.detach() for name, value in rows.others.items()}
        lr = torch.tensor(rows.like.lr, dtype=x.dtype if x.is_floating_point() else torch.float32)
        return values, others, [leaf for leaf in rows.leaves if isinstance(leaf, Tensor)], self.buffers(rows), lr, x, y

    def buffers(self, rows: Rows) -> dict[str, Tensor]:
        """SGD's momentum by parameter, zero before the first step."""
        if not self.updates or not self.momentum:
            return {}
        return {
            name: buffer if (buffer := rows.optimizer.state[value].get(MOMENTUM)) is not None else torch.zeros_like(value)
            for name, value in rows.parameters.items()
            if value.requires_grad
        }

    def trace(self, rows: Rows, index: int, x: Tensor, y: Tensor) -> GraphModule:
        """Run a step under the tracer; nothing is changed by it."""
        from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds to import

        flat, structure = pytree.tree_flatten(self.inputs(rows, x, y))
        plain = [leaf for leaf in rows.leaves if not isinstance(leaf, Tensor)]

        def step(*tensors: Tensor) -> Any:
            values, others, leaves, buffers, lr, images, labels = pytree.tree_unflatten(tensors, structure)
            first, second = iter(leaves), iter(plain)
            given = [next(first) if isinstance(leaf, Tensor) else next(second) for leaf in rows.leaves]
            return self.one_step(rows, values, others, given, buffers, lr, index, images, labels)

        # The second pass turns changes in place into values and one copy at the end, which is what the compiler is good at.
        first = make_fx(step)(*[value.clone() for value in flat])
        return make_fx(functionalize(first))(*[value.clone() for value in flat])

    def one_step(
        self,
        rows: Rows,
        values: dict[str, Tensor],
        others: dict[str, Tensor],
        leaves: list[Any],
        buffers: dict[str, Tensor],
        lr: Tensor,
        index: int,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The step as it is traced; returns the losses and, where they are used outside, the gradients."""
        free = {name: value.detach().requires_grad_(rows.parameters[name].requires_grad) for name, value in values.items()}
        losses = rows.together(free, others, leaves, index, x, y)
        wanted = [name for name, value in free.items() if value.requires_grad]
        found = torch.autograd.grad(losses.sum(), [free[name] for name in wanted], allow_unused=True)
        gradients = {name: slope for name, slope in zip(wanted, found, strict=True) if slope is not None}
        self.trained = list(gradients)
        with torch.no_grad():
            if self.whole and rows.bench.method.gradients:
                detached = {name: value.detach() for name, value in values.items()}
                gradients = rows.ruled(detached, gradients, others, leaves, index, x, y)
            if not self.updates:
                return losses.detach(), gradients
            for name, slope in gradients.items():
                self.update(values[name], slope, buffers.get(name), lr)
        return losses.detach(), {}

    def update(self, value: Tensor, slope: Tensor, buffer: Tensor | None, lr: Tensor) -> None:
        """SGD, as torch's own does it."""
        if self.decay:
            slope = slope.add(value, alpha=self.decay)
        if buffer is not None:
            slope = buffer.mul_(self.momentum).add_(slope)
        value.sub_(lr * slope)

    def warm_up(self, rows: Rows, x: Tensor, y: Tensor) -> None:
        """Compile now, on copies."""
        flat = pytree.tree_leaves(self.inputs(rows, x, y))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.compiled(*[value.clone() for value in flat])

    def run(self, rows: Rows, index: int, x: Tensor, y: Tensor) -> Tensor:
        inputs = self.inputs(rows, x, y)
        with torch.no_grad():
            losses, gradients = self.compiled(*pytree.tree_leaves(inputs))
        buffers: Mapping[str, Tensor] = inputs[3]
        if self.updates:
            for name in self.trained if self.momentum else ():
                rows.optimizer.state[rows.parameters[name]][MOMENTUM] = buffers[name]
            return losses  # type: ignore[no-any-return]
        for name, value in rows.parameters.items():
            value.grad = gradients.get(name)
        if not self.whole:
            rows.apply_rules(index, x, y)
        rows.optimizer.step()
        return losses  # type: ignore[no-any-return]


def prepared_compiler(threads: int) -> Callable[[GraphModule], Program]:
    """Torch's compiler, with programs kept in the cache folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder()))
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "layout_optimization": False,  # channels-last makes convolutions of stacked clients slower
        "fallback_random": True,  # dropout draws the numbers it would draw uncompiled
        "cpp.threads": threads,
        "compile_threads": 1,
    }
    return lambda graph: torch.compile(graph, dynamic=False, options=options)
