"""The backend for many small clients: clients with equal batch sizes are stacked and trained together.

Only the training steps are stacked; everything else runs client by client. The first training in each state is preceded by a trial with
two clients, in double precision on a copy. If the stacked steps fail or compute different values, an error names the responsible part.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyfed.backends.base import Outcome
from polyfed.backends.compiled import compiled_steps
from polyfed.backends.in_process import InProcess
from polyfed.backends.stacked import Key, Stack, Trainee
from polyfed.core.client import Client, answer, batch_indices, local_validation
from polyfed.core.data_types import ClientData, Preparation
from polyfed.core.method import Method
from polyfed.core.rounds import Payload, Request
from polyfed.core.slots import ONE_BY_ONE
from polyfed.core.workbench import ClientState, Workbench, sent_to
from polyfed.errors import Declined, NotFinite, SettingError

log = logging.getLogger("polyfed")

MAX_CLIENTS = 50
MAX_BYTES = 1 << 30
TRIAL_STEPS, TRIAL_BATCH = 3, 4
TRIAL_TOLERANCE = 1e-6


class Fused(InProcess):
    """Stacks clients for the standard training request, and runs all other requests client by client.

    Attributes:
        required: Raise an error if clients cannot be stacked.
    """

    takes_groups = True
    required = True

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        self.unfit = model_problem(bench)
        if self.unfit and self.required:
            raise SettingError(f"--backend fused: {self.unfit} Use --backend process.")
        self.verdicts: dict[Key, str] = {}
        self.largest: int | None = None
        self.compiled = compiled_steps(bench)

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        if request.what != "train" or "train" in self.bench.method.answers:
            yield from super().outcomes(request, clients)
            return
        for group in self.groups(clients):
            yield from self.group_outcomes(request, group)

    def groups(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        by_sizes: dict[tuple[int, ...], list[str]] = {}
        for name in clients:
            by_sizes.setdefault(self.batch_sizes(name), []).append(name)
        groups = [group for same in by_sizes.values() for group in evenly(same, self.max_clients(same[0]) if len(same) > 1 else 1)]
        # The order of replies is fixed, so clients can be stacked only if the groups are consecutive.
        if [name for group in groups for name in group] == list(clients):
            yield from groups
        else:
            yield from ([name] for name in clients)

    def batch_sizes(self, name: str) -> tuple[int, ...]:
        """Return a client's batch sizes in a round, which depend only on its number of samples."""
        settings, needs_two = self.bench.settings, bool(self.bench.batch_norms)
        count = len(self.data[name].train)
        return tuple(len(chunk) for chunk in batch_indices(count, settings, needs_two, torch.Generator(), name))

    def max_clients(self, name: str) -> int:
        if self.largest is None:
            self.largest = max(1, min(MAX_CLIENTS, MAX_BYTES // step_bytes(self.bench, self.data[name])))
        return self.largest

    def group_outcomes(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        """Train a group together if possible, otherwise one client at a time."""
        if len(group) == 1:
            yield from super().outcomes(request, group)
            return
        try:
            trainees = [Trainee(self.client(request, name, self.current_state(name)), request.payloads[name]) for name in group]
        except (NotFinite, Declined):
            trainees = []
        keys = {trainee.key for trainee in trainees}
        if len(keys) != 1 or self.fusing_problem(request, group, keys.pop()):
            yield from super().outcomes(request, group)
            return
        stack = Stack(trainees)
        for place, (trainee, total, steps) in enumerate(self.train(stack)):
            yield self.end(trainee, stack, place, total, steps)

    def train(self, stack: Stack) -> list[tuple[Trainee, Tensor, int]]:
        return stack.train() if self.compiled is None else stack.train(functools.partial(self.compiled.step_of_stack, stack))

    def end(self, trainee: Trainee, stack: Stack, place: int, total: Tensor, steps: int) -> Outcome:
        name = trainee.client.id
        try:
            payload = trainee.end(*stack.row(place), total, steps)
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                error.locate(name, trainee.client.round)
                raise
            return Outcome(name, None, self.current_state(name), problem=error.reason)
        return Outcome(name, payload, trainee.client.state, trainee.client.loss, validation=local_validation(trainee.client))

    def fusing_problem(self, request: Request, group: Sequence[str], key: Key) -> str:
        """Run a trial once per state, and return why such clients cannot be fused; empty if they can.

        Raises:
            SettingError: If fusing is required and the first trial fails.
        """
        if key not in self.verdicts:
            first = not self.verdicts
            self.verdicts[key] = reason = trial(
                self.bench, request, [(self.data[name], self.current_state(name)) for name in group[:2]]
            )
            if reason and first and self.required:
                raise SettingError(f"--backend fused: {reason} Use --backend process.")
            if reason:
                log.warning("Round %d: training such clients one by one from now on: %s", request.round, reason)
        return self.verdicts[key]


def evenly(names: Sequence[str], largest: int) -> Iterator[Sequence[str]]:
    """Yield as few groups as possible, whose sizes differ by at most one."""
    count = math.ceil(len(names) / largest)
    small, more = divmod(len(names), count)
    start = 0
    for place in range(count):
        end = start + small + (place < more)
        yield names[start:end]
        start = end


def model_problem(bench: Workbench) -> str:
    """Return the reason why clients with this model and method cannot be stacked, or an empty string."""
    slot = next((slot for slot in ONE_BY_ONE if bench.method.fills(slot)), None)
    if slot is not None:
        return f"{bench.method} defines a custom {slot.replace('_', ' ')}, which runs one client at a time."
    if bench.settings.layout == "channels_last":
        return "--layout channels_last works only if clients train one by one."
    for path, module in bench.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{path} is a dropout layer, which would draw different random numbers for stacked clients."
    return ""


def step_bytes(bench: Workbench, data: ClientData) -> int:
    """Return the memory for training one client: values, gradients, optimizer buffers and saved activations."""
    model = copy.deepcopy(bench.model).train()
    x, _ = data.train.batch(torch.arange(min(len(data.train), bench.settings.batch_size)))
    saved: dict[int, int] = {}

    def record(value: Tensor) -> Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(record, lambda value: value):
        model(bench.preparation.for_testing(sent_to(x, bench.device)))
    state = sum(value.nbytes for value in bench.live.values())
    return state * (4 + len(bench.settings.optimizer_buffers)) + 2 * sum(saved.values())


class DoublePreparation(Preparation):
    def for_testing(self, x: Tensor) -> Tensor:
        return super().for_testing(x).double()


def to_double(tree: Any) -> Any:
    """Copy a tree, with floating-point tensors in double precision."""

    def double(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.detach().clone()

    return pytree.tree_map(double, tree)


def trial_bench(bench: Workbench) -> Workbench:
    settings = dataclasses.replace(
        bench.settings, local_steps=TRIAL_STEPS, batch_size=min(TRIAL_BATCH, bench.settings.batch_size), on_nan="stop"
    )
    preparation = DoublePreparation(bench.preparation.mean, bench.preparation.std, bench.preparation.augment)
    model = copy.deepcopy(bench.model).double()
    return dataclasses.replace(bench, model=model, settings=settings, preparation=preparation, initial=to_double(bench.initial))


def trial(bench: Workbench, request: Request, clients: Sequence[tuple[ClientData, ClientState]]) -> str:
    """Train two clients for a few steps one by one and stacked, on copies. Return the reason why they cannot be stacked, or an empty string."""
    pairs = []
    for copied in (trial_bench(bench), trial_bench(bench)):
        states = [ClientState(*to_double((state.entries, state.memory))) for _, state in clients]
        trial_clients = [
            Client(data, copied, state, request.round, request.attempt) for (data, _), state in zip(clients, states, strict=True)
        ]
        sent = [request.payloads[client.id] for client in trial_clients]
        payloads = [Payload(to_double(dict(payload.entries)), to_double(dict(payload.extras))) for payload in sent]
        pairs.append(list(zip(trial_clients, payloads, strict=True)))
    separate, stacked = pairs
    expected = [results(client, answer(client, "train", payload)) for client, payload in separate]
    try:
        stack = Stack([Trainee(client, payload) for client, payload in stacked])
        found = [results(t.client, t.end(*stack.row(i), total, steps)) for i, (t, total, steps) in enumerate(stack.train())]
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]
        return f"{responsible_part(error, bench.method)}: {type(error).__name__}: {reason}."
    different = next((name for a, b in zip(expected, found, strict=True) for name in differences(a, b)), None)
    if different is None:
        return ""
    return f"{bench.method} computes different values if clients are stacked ({different})."


def results(client: Client, payload: Payload) -> dict[str, Any]:
    # A difference in the last bit can change an upload that is rounded or sparsified, so its inputs are compared instead.
    tree = {
        "upload": {} if client.bench.method.uploads else dict(payload.entries),
        "extras": dict(payload.extras),
        "state": client.state.entries,
        "memory": client.state.memory,
        "loss": client.loss,
        "entry": {name: value.detach().clone() for name, value in client.bench.live.items()},
    }
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield the names of results that differ by more than rounding."""
    if expected.keys() != found.keys():
        yield "other results"
        return
    for name, value in expected.items():
        if isinstance(value, Tensor | float):
            a, b = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(found[name], dtype=torch.float64)
            if a.shape != b.shape or not float((a - b).norm()) <= TRIAL_TOLERANCE * max(float(a.norm()), 1e-3):
                yield name
        elif isinstance(value, int | str | bool) and value != found[name]:
            yield name


def responsible_part(error: Exception, method: Method) -> str:
    """Return which part of the method raised the error, according to the stack trace."""
    running = []
    trace = error.__traceback__
    while trace is not None:
        running.append(trace.tb_frame)
        trace = trace.tb_next
    for part in method.parts:
        for slot in ("objective", "gradients", "task_loss"):
            for hook in part.items(slot):
                code = hook.__code__ if isinstance(hook, FunctionType) else None
                if any(frame.f_code is code or frame.f_locals.get("self") is hook for frame in running):
                    return f"{part.name} cannot train stacked clients in its {slot.replace('_', ' ')}"
    return f"{method} cannot train stacked clients"
