"""The backend for many small clients: those with batches of equal sizes are stacked and trained in one program.

Everything but the steps of training (receiving, hooks before and after, uploads, every other question) goes through the clients
themselves, one by one, as in the ordinary way. Before a way of training is used it is tried on two clients, in double precision and
on a copy: if the fused steps fail, or give other numbers than the ordinary ones, the run says which part of the method is to blame.
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

CLIENTS_TOGETHER = 50
BYTES_TOGETHER = 1 << 30
TRIAL_STEPS, TRIAL_BATCH = 3, 4
TRIAL_TOLERANCE = 1e-6


class Fused(InProcess):
    """Stacks clients for the ordinary training question; whatever cannot be stacked goes the ordinary way."""

    takes_groups = True
    insists = True

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients)
        self.unfit = why_model_cannot_be_fused(bench)
        if self.unfit and self.insists:
            raise SettingError(f"--backend fused: {self.unfit} Use --backend process.")
        self.verdicts: dict[Key, str] = {}
        self.largest: int | None = None
        self.compiled = compiled_steps(bench)

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        """What comes of the question at each client; in training, groups of clients are worked out together."""
        if request.what != "train" or "train" in self.bench.method.answers:
            yield from super().outcomes(request, clients)
            return
        for group in self.groups(clients):
            yield from self.outcomes_of(request, group)

    def groups(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Neighbours with equal batch sizes, in even groups that fit into memory."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for name in clients:
            alike.setdefault(self.batch_sizes(name), []).append(name)
        sized = [group for same in alike.values() for group in evenly(same, self.limit(same[0]) if len(same) > 1 else 1)]
        # The order of replies is fixed; where sizes alternate, only neighbours can wait for each other.
        if [name for group in sized for name in group] == list(clients):
            yield from sized
        else:
            yield from ([name] for name in clients)

    def batch_sizes(self, name: str) -> tuple[int, ...]:
        """The sizes of a client's batches in a round, which depend only on its number of samples."""
        settings, needs_two = self.bench.settings, bool(self.bench.batch_norms)
        count = len(self.data[name].train)
        return tuple(len(chunk) for chunk in batch_indices(count, settings, needs_two, torch.Generator(), name))

    def limit(self, name: str) -> int:
        """How many clients fit together, by the memory of one step."""
        if self.largest is None:
            self.largest = max(1, min(CLIENTS_TOGETHER, BYTES_TOGETHER // bytes_of_a_step(self.bench, self.data[name])))
        return self.largest

    def outcomes_of(self, request: Request, group: Sequence[str]) -> Iterator[Outcome]:
        """Train a group together, or one by one where that is all that can be done."""
        if len(group) == 1:
            yield from super().outcomes(request, group)
            return
        try:
            trainees = [self.begun(request, name) for name in group]
        except (NotFinite, Declined):
            trainees = []
        keys = {trainee.key for trainee in trainees}
        if len(keys) != 1 or self.why_not(request, group, keys.pop()):
            yield from super().outcomes(request, group)
            return
        stack = Stack(trainees)
        for place, (trainee, total, steps) in enumerate(self.trained(stack)):
            yield self.ended(trainee, stack, place, total, steps)

    def begun(self, request: Request, name: str) -> Trainee:
        return Trainee(
            Client(self.data[name], self.bench, self.current_state(name), request.round, request.attempt), request.payloads[name]
        )

    def trained(self, stack: Stack) -> list[tuple[Trainee, Tensor, int]]:
        return stack.train() if self.compiled is None else stack.train(functools.partial(self.compiled.step_of_stack, stack))

    def ended(self, trainee: Trainee, stack: Stack, place: int, total: Tensor, steps: int) -> Outcome:
        name = trainee.client.id
        try:
            payload = trainee.end(*stack.row(place), total, steps)
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            return Outcome(name, None, self.current_state(name), problem=str(error))
        return Outcome(name, payload, trainee.client.state, trainee.client.loss, validation=local_validation(trainee.client))

    def why_not(self, request: Request, group: Sequence[str], key: Key) -> str:
        """Why clients in this state cannot be fused; found out by a trial, once for each state. Before anything is trained it is an error."""
        if key not in self.verdicts:
            first = not self.verdicts
            self.verdicts[key] = reason = trial(
                self.bench, request, [(self.data[name], self.current_state(name)) for name in group[:2]]
            )
            if reason and first and self.insists:
                raise SettingError(f"--backend fused: {reason} Use --backend process.")
            if reason:
                log.warning("Round %d: clients are trained one by one from here on: %s", request.round, reason)
        return self.verdicts[key]


def evenly(names: Sequence[str], largest: int) -> Iterator[Sequence[str]]:
    """As few groups as possible, of sizes that differ by one at most."""
    count = math.ceil(len(names) / largest)
    small, more = divmod(len(names), count)
    start = 0
    for place in range(count):
        end = start + small + (place < more)
        yield names[start:end]
        start = end


def why_model_cannot_be_fused(bench: Workbench) -> str:
    """Why no client with this model can be stacked; empty when they may."""
    own = next((slot for slot in ONE_BY_ONE if bench.method.fills(slot)), None)
    if own is not None:
        return f"{bench.method} decides the {own.replace('_', ' ')} of each client by itself, one client after the other."
    if bench.settings.layout == "channels_last":
        return "--layout channels_last is for clients that train one by one."
    for path, module in bench.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{path} is dropout, whose random numbers would be others than when clients train one by one."
    return ""


def bytes_of_a_step(bench: Workbench, data: ClientData) -> int:
    """What training one client takes: values, gradients, optimizer buffers, and what the forward pass keeps for the backward one."""
    model = copy.deepcopy(bench.model).train()
    x, _ = data.train.batch(torch.arange(min(len(data.train), bench.settings.batch_size)))
    saved: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        model(bench.preparation.for_testing(sent_to(x, bench.device)))
    state = sum(value.nbytes for value in bench.live.values())
    return state * (4 + len(bench.settings.optimizer_buffers)) + 2 * sum(saved.values())


class Doubled(Preparation):
    def for_testing(self, x: Tensor) -> Tensor:
        return super().for_testing(x).double()


def doubled(tree: Any) -> Any:
    """The same with every floating-point tensor copied in double precision."""

    def double(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.detach().clone()

    return pytree.tree_map(double, tree)


def trial_bench(bench: Workbench) -> Workbench:
    """A copy of the bench in double precision, for a few small steps."""
    few = dataclasses.replace(
        bench.settings, local_steps=TRIAL_STEPS, batch_size=min(TRIAL_BATCH, bench.settings.batch_size), on_nan="stop"
    )
    preparation = Doubled(bench.preparation.mean, bench.preparation.std, bench.preparation.augment)
    model = copy.deepcopy(bench.model).double()
    return dataclasses.replace(bench, model=model, settings=few, preparation=preparation, initial=doubled(bench.initial))


def trial(bench: Workbench, request: Request, clients: Sequence[tuple[ClientData, ClientState]]) -> str:
    """Train two clients for a few steps one by one and fused, on a copy; returns why the second way cannot be used, or nothing."""
    pairs = []
    for on in (trial_bench(bench), trial_bench(bench)):
        states = [ClientState(*doubled((state.entries, state.memory))) for _, state in clients]
        at_work = [
            Client(data, on, state, request.round, request.attempt) for (data, _), state in zip(clients, states, strict=True)
        ]
        sent = [request.payloads[client.id] for client in at_work]
        payloads = [Payload(doubled(dict(payload.entries)), doubled(dict(payload.extras))) for payload in sent]
        pairs.append(list(zip(at_work, payloads, strict=True)))
    apart, together = pairs
    wanted = [results(client, answer(client, "train", payload)) for client, payload in apart]
    try:
        stack = Stack([Trainee(client, payload) for client, payload in together])
        found = [results(t.client, t.end(*stack.row(i), total, steps)) for i, (t, total, steps) in enumerate(stack.train())]
    except Exception as error:
        return f"{part_to_blame(error, bench.method)}: {in_short(error)}."
    different = next((name for a, b in zip(wanted, found, strict=True) for name in differences(a, b)), None)
    if different is None:
        return ""
    return f"{bench.method} trains other numbers when clients are stacked ({different})."


def results(client: Client, payload: Payload) -> dict[str, Any]:
    """Everything that a client's training has led to, by a name that tells where."""
    # Uploads that a method rounds or thins out jump with the last bit; what they are made from is compared all the same.
    tree = {
        "upload": {} if client.bench.method.uploads else dict(payload.entries),
        "extras": dict(payload.extras),
        "state": client.state.entries,
        "memory": client.state.memory,
        "loss": client.loss,
        "entry": {name: value.detach().clone() for name, value in client.bench.live.items()},
    }
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Names of what differs by more than rounding."""
    if wanted.keys() != found.keys():
        yield "other results"
        return
    for name, value in wanted.items():
        if isinstance(value, Tensor | float):
            a, b = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(found[name], dtype=torch.float64)
            if a.shape != b.shape or not float((a - b).norm()) <= TRIAL_TOLERANCE * max(float(a.norm()), 1e-3):
                yield name
        elif isinstance(value, int | str | bool) and value != found[name]:
            yield name


def part_to_blame(error: Exception, method: Method) -> str:
    """Which part of the method an error came from, by the functions that were at work."""
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


def in_short(error: Exception) -> str:
    """The first sentence of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('. ')[0].rstrip('.')[:200]}"
