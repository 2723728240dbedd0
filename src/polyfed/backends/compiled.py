"""Training steps compiled by torch: forward, loss, backward, the method's gradient rules and the SGD update in one program.

A step is traced through the uncompiled code, so that the program contains everything a method does. A trace would freeze the step and
round numbers, so methods that read them in a step are not compiled. Programs are cached on disk. Compiled results differ in the last bits.
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
SECONDS_TO_COMPILE, FRACTION_SAVED = 60.0, 0.2
MOMENTUM = "momentum_buffer"

Program: TypeAlias = Callable[..., Tensor]


def cache_folder() -> Path:
    folder = os.environ.get(FOLDER)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(folder) if folder else base / "polyfed" / "compiled"


def compiler_problem() -> str:
    """Return the reason why this machine cannot compile, or an empty string."""
    if os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"):
        return ""
    return "there is no C++ compiler (g++ or clang++) on this machine"


def compiled_steps(bench: Workbench) -> Compiled | None:
    """Make the bench use compiled steps if the settings request them and the method permits it."""
    if bench.settings.compile == "off":
        return None
    slot = next((slot for slot in ONE_BY_ONE if bench.method.fills(slot)), None)
    if slot is not None:
        if bench.settings.compile == "on":
            raise SettingError(f"--compile on: {bench.method} defines a custom {slot.replace('_', ' ')}. Use --compile off.")
        return None
    steps = Compiled(bench)
    bench.own_step = steps.step_of_client
    return steps


class Compiled:
    """Runs the steps of clients or stacks with compiled programs.

    With ``auto``, measures the steps of the first round and compiles only if the remaining steps save more time than compiling takes.
    """

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.required = bench, bench.settings.compile == "on"
        self.programs: dict[Any, Traced | None] = {}
        self.seconds: list[float] = []
        self.round = 0
        self.disabled = False
        self.single: Single | None = None
        reason = compiler_problem()
        if reason and self.required:
            raise SettingError(f"--compile on: {reason}. Install one, or use --compile off.")
        if reason:
            self.disable(reason)
        elif self.required:
            importlib.import_module("torch._dynamo")  # imports a thousand modules: once here instead of in every worker process

    def disable(self, reason: str) -> None:
        self.disabled = True
        log.info("Steps are not compiled: %s.", reason)

    def step_of_client(self, client: Client, index: int, x: Tensor, y: Tensor) -> Tensor:
        return self.step(client.round, lambda: self.single_of(client), lambda: client.train_on(index, x, y), index, x, y)

    def single_of(self, client: Client) -> Single:
        """Return the tensors of a client that trains alone; the same object for all steps of a round."""
        if self.single is None or self.single.client is not client:
            self.single = Single(client)
        return self.single

    def step_of_stack(self, stack: Stack, index: int, x: Tensor, y: Tensor) -> Tensor:
        return self.step(stack.like.round, lambda: stack, lambda: stack.train_on(index, x, y), index, x, y)

    def step(
        self, number: int, rows_of: Callable[[], Rows], uncompiled: Callable[[], Tensor], index: int, x: Tensor, y: Tensor
    ) -> Tensor:
        if self.disabled:
            return uncompiled()
        if not self.required and not self.saves_time(number):
            start = time.perf_counter()
            losses = uncompiled()
            self.seconds.append(time.perf_counter() - start)
            return losses
        rows = rows_of()
        traced = self.program(rows, index, x, y)
        return uncompiled() if traced is None else traced.run(rows, index, x, y)

    def saves_time(self, number: int) -> bool:
        """Return True if compiling saves time, according to the steps of the first round; False during that round."""
        if self.programs:
            return True
        self.round = self.round or number
        if number == self.round:
            return False
        measured = sorted(self.seconds[STEPS_TO_WARM_UP:] or self.seconds)
        remaining = measured[len(measured) // 2] * len(self.seconds) * (self.bench.settings.rounds - number + 1)
        if remaining * FRACTION_SAVED < SECONDS_TO_COMPILE:
            self.disable(
                f"the remaining steps take {remaining:.0f} s, too little to save the {SECONDS_TO_COMPILE:.0f} s of compiling"
            )
            return False
        return True

    def program(self, rows: Rows, index: int, x: Tensor, y: Tensor) -> Traced | None:
        """Return the program for tensors of these shapes; None if such steps are not compiled."""
        key = (rows.key, tuple(x.shape), x.dtype, tuple(y.shape))
        if key in self.programs:
            return self.programs[key]
        if len(self.programs) >= MAX_PROGRAMS:
            if len(self.programs) == MAX_PROGRAMS:
                log.info("Steps of other shapes are not compiled: the limit of %d programs is reached.", MAX_PROGRAMS)
            self.programs[key] = None
            return None
        start = time.perf_counter()
        try:
            self.programs[key] = traced = compile_step(rows, index, x, y)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if self.required:
                raise ClientFailure(
                    f"--compile on: the training step of {self.bench.method} cannot be compiled: {reason}. Use --compile off."
                ) from error
            self.programs[key] = None
            self.disable(f"the training step of {self.bench.method} cannot be compiled ({reason})")
            return None
        seconds = time.perf_counter() - start
        log.info(
            "Compiled a training step for batches of shape %s in %.1f s. Results differ in the last bits.", tuple(x.shape), seconds
        )
        return traced


def compile_step(rows: Rows, index: int, x: Tensor, y: Tensor) -> Traced:
    """Compile the whole step if possible, otherwise all of it except the gradient rules and the update."""
    try:
        whole = Traced(rows, index, x, y, whole=True)
        whole.warm_up(rows, x, y)
    except Exception as error:
        if not rows.bench.method.gradients:
            raise
        log.info("Compiling the step without the gradient rules of %s (%s).", rows.bench.method, type(error).__name__)
    else:
        return whole
    part = Traced(rows, index, x, y, whole=False)
    part.warm_up(rows, x, y)
    return part


class Traced:
    def __init__(self, rows: Rows, index: int, x: Tensor, y: Tensor, whole: bool) -> None:
        settings = rows.bench.settings
        self.whole = whole
        self.updates = whole and settings.optimizer == "sgd"
        self.momentum, self.decay = settings.momentum, settings.weight_decay
        self.trained: list[str] = []
        with rows.timeless():
            graph = self.trace(rows, index, x, y)
        self.compiled: Program = compile_graph(graph, settings.threads)

    def inputs(self, rows: Rows, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        values = {name: value.detach() for name, value in rows.parameters.items()}
        others = {name: value.detach() for name, value in rows.others.items()}
        lr = torch.tensor(rows.like.lr, dtype=x.dtype if x.is_floating_point() else torch.float32)
        return values, others, [leaf for leaf in rows.leaves if isinstance(leaf, Tensor)], self.buffers(rows), lr, x, y

    def buffers(self, rows: Rows) -> dict[str, Tensor]:
        """Return the SGD momentum per parameter, which is zero before the first step."""
        if not self.updates or not self.momentum:
            return {}
        return {
            name: buffer if (buffer := rows.optimizer.state[value].get(MOMENTUM)) is not None else torch.zeros_like(value)
            for name, value in rows.parameters.items()
            if value.requires_grad
        }

    def trace(self, rows: Rows, index: int, x: Tensor, y: Tensor) -> GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds to import

        flat, structure = pytree.tree_flatten(self.inputs(rows, x, y))
        plain = [leaf for leaf in rows.leaves if not isinstance(leaf, Tensor)]

        def step(*tensors: Tensor) -> Any:
            values, others, leaves, buffers, lr, images, labels = pytree.tree_unflatten(tensors, structure)
            first, second = iter(leaves), iter(plain)
            given = [next(first) if isinstance(leaf, Tensor) else next(second) for leaf in rows.leaves]
            return self.one_step(rows, values, others, given, buffers, lr, index, images, labels)

        # The second pass replaces changes in place by new values and one copy at the end, which compile to faster code.
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
        """Run the step to be traced. Return the losses, and the gradients if the program does not apply them."""
        free = {name: value.detach().requires_grad_(rows.parameters[name].requires_grad) for name, value in values.items()}
        losses = rows.all_losses(free, others, leaves, index, x, y)
        names = [name for name, value in free.items() if value.requires_grad]
        found = torch.autograd.grad(losses.sum(), [free[name] for name in names], allow_unused=True)
        gradients = {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}
        self.trained = list(gradients)
        with torch.no_grad():
            if self.whole and rows.bench.method.gradients:
                detached = {name: value.detach() for name, value in values.items()}
                gradients = rows.all_gradients(detached, gradients, others, leaves, index, x, y)
            if not self.updates:
                return losses.detach(), gradients
            for name, gradient in gradients.items():
                self.update(values[name], gradient, buffers.get(name), lr)
        return losses.detach(), {}

    def update(self, value: Tensor, gradient: Tensor, buffer: Tensor | None, lr: Tensor) -> None:
        """Apply the same update as torch.optim.SGD."""
        if self.decay:
            gradient = gradient.add(value, alpha=self.decay)
        if buffer is not None:
            gradient = buffer.mul_(self.momentum).add_(gradient)
        value.sub_(lr * gradient)

    def warm_up(self, rows: Rows, x: Tensor, y: Tensor) -> None:
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


def compile_graph(graph: GraphModule, threads: int) -> Program:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder()))
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "layout_optimization": False,  # channels-last slows down convolutions of stacked clients
        "fallback_random": True,  # dropout draws the same numbers as uncompiled
        "cpp.threads": threads,
        "compile_threads": 1,
    }
    return torch.compile(graph, dynamic=False, options=options)
