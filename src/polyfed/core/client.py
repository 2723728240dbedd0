"""The client: its data and state, and the only training loop. Methods fill its slots; they never copy it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from polyfed.core.data_types import ClientData, Examples, in_batches
from polyfed.core.entries import OPTIMIZER
from polyfed.core.rounds import Payload
from polyfed.core.seeds import default_stream, generator
from polyfed.core.slots import Answer
from polyfed.core.workbench import (
    CPU,
    ClientState,
    Workbench,
    forward_with_features,
    give_back_much,
    make_optimizer,
    moved,
    precision,
    sent_to,
)
from polyfed.errors import ClientFailure, DataError, NotFinite
from polyfed.tasks.known import value_by
from polyfed.tasks.metrics import IN_DETAIL
from polyfed.tasks.task import TaskScores

if TYPE_CHECKING:
    from polyfed.core.privacy import Charge
    from polyfed.core.sharing import Phase
    from polyfed.settings import Settings


T = TypeVar("T")


class Step:
    """One training step, as passed to objectives and gradient hooks. ``features`` is the input of the head, if a part needs it."""

    __slots__ = ("client", "features", "index", "logits", "task_loss", "x", "y")

    def __init__(self, client: Client, index: int, x: Tensor, y: Tensor) -> None:
        self.client, self.index, self.x, self.y = client, index, x, y
        self.logits: Tensor
        self.task_loss: Tensor
        self.features: Tensor | None = None


class Client:
    """A client in one round: its data, its client state, and the workbench that it uses."""

    def __init__(
        self,
        data: ClientData,
        bench: Workbench,
        state: ClientState,
        round_number: int,
        attempt: int = 0,
        spend: Callable[[Charge], None] | None = None,
    ) -> None:
        self.data, self.bench, self.round, self.attempt = data, bench, round_number, attempt
        self.own_account = spend
        self.id = data.id
        self.state = ClientState(dict(state.entries), dict(self.brought(state.memory)))
        self.received: Mapping[str, Tensor] = {}
        self.extras: Mapping[str, Any] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.stage = "start"
        self.loss: float | None = None

    @property
    def model(self) -> nn.Module:
        """Resident model. After ``receive`` it has this client's values."""
        return self.bench.model

    @property
    def memory(self) -> dict[str, Any]:
        """Values that a method keeps at this client between rounds."""
        return self.state.memory

    @property
    def rounds(self) -> int:
        """Number of rounds in the run."""
        return self.bench.settings.rounds

    @cached_property
    def phase(self) -> Phase:
        """Sharing plan of the current round."""
        return self.bench.plan.at(self.round)

    @cached_property
    def generator(self) -> torch.Generator:
        """Random stream of this client for this round."""
        return generator(self.bench.settings.seed, "client", self.round, self.id)

    @property
    def lr(self) -> float:
        """Learning rate of this round."""
        settings, schedule = self.bench.settings, self.bench.own_schedule
        if schedule is None and settings.schedule == "constant":
            schedule = self.bench.method.schedule
        return settings.lr_at(self.round) if schedule is None else settings.lr * schedule(self.round, settings.rounds)

    def spend(self, charge: Charge) -> None:
        """Charge the client's privacy ledger before training. A ledger that spans several runs may refuse."""
        if self.own_account is not None:
            self.own_account(charge)

    def receive(self, entries: Mapping[str, Tensor]) -> None:
        """Load this client's values: those that were sent, otherwise its client state, otherwise the initial values."""
        self.stage = "receiving"
        entries = self.brought(entries)
        for hook in self.bench.method.receiving:
            entries = hook(self, entries)
        self.received = entries
        unsent = [name for name in self.bench.live if name not in entries]
        self.bench.load({name: value for name, value in entries.items() if name in self.bench.live})
        self.bench.load({name: self.state.entries.get(name, self.bench.initial[name]) for name in unsent})

    def shared_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable parameters whose values the server sent."""
        return ((name, p) for name, p in self.bench.parameters.items() if name in self.received)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Create an optimizer, with the buffers that were received or are part of the client state."""
        if self.bench.own_optimizer is not None:
            return self.bench.own_optimizer(self.bench.parameters.values(), lr=self.lr)
        optimizer = make_optimizer(self.bench.settings, self.bench.parameters.values(), self.lr)
        saved = {**self.state.entries, **self.received}
        for name, value in saved.items():
            if name.startswith(OPTIMIZER):
                buffer, parameter = name.removeprefix(OPTIMIZER).split("/", 1)
                optimizer.state[self.bench.parameters[parameter]][buffer] = value.to(self.bench.device, copy=True)
        return optimizer

    def optimizer_entries(self) -> dict[str, Tensor]:
        """Return the optimizer's buffers as entries."""
        if self.optimizer is None:
            return {}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.bench.parameters.items()}
        return {
            f"{OPTIMIZER}{buffer}/{names[parameter]}": value
            for parameter, state in self.optimizer.state.items()
            for buffer, value in state.items()
            if isinstance(value, Tensor)
        }

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this round's training batches, preprocessed and passed through the method's ``inputs``."""
        settings, train, method = self.bench.settings, self.data.train, self.bench.method
        needs_two = any(norm.training for norm in self.bench.batch_norms)
        sampling = method.sampling
        labels = train.labels if settings.sampling == "balanced" else None
        shuffled = batch_indices(len(train), settings, needs_two, self.generator, self.id, labels)
        for indices in shuffled if sampling is None else sampling(self):
            # A batch without samples has the shape of the others before preprocessing.
            taken = indices if len(indices) else torch.zeros(1, dtype=torch.long)
            x, y = (sent_to(part, self.bench.device) for part in train.batch(taken))
            if not len(indices):
                yield x[:0], y[:0]
                continue
            x, y = self.bench.preparation.pair_for_training(x, self.bench.task.for_loss(y))
            for change in method.inputs:
                x, y = change(self, x, y)
            yield x, y

    def step(self, index: int, x: Tensor, y: Tensor) -> Step:
        """Create the step that the method's hooks receive. Backends override it."""
        return Step(self, index, x, y)

    def forward(self, index: int, x: Tensor, y: Tensor) -> Step:
        """Compute the logits and the task loss of one batch."""
        step = self.step(index, x, y)
        replaced = self.bench.method.task_loss
        with precision(self.bench.settings.amp, self.bench.device):
            if self.bench.wants_features:
                step.logits, step.features = forward_with_features(self.bench, x)
            else:
                step.logits = self.model(x)
            step.task_loss = self.bench.loss(step.logits, y) if replaced is None else replaced(step)
        return step

    def full_loss(self, step: Step) -> Tensor:
        """Return the loss to minimise: the task loss plus the terms of the method."""
        loss = step.task_loss
        with precision(self.bench.settings.amp, self.bench.device):
            for term in self.bench.method.objective:
                loss = loss + term(step)
        return loss

    def backward(self, index: int, x: Tensor, y: Tensor) -> tuple[Step, Tensor]:
        """Compute the gradients of one batch, from the full loss or by the method's ``batch_gradient``. Return the step and its loss."""
        assert self.optimizer is not None
        batch_gradient = self.bench.method.batch_gradient
        step = self.forward(index, x, y) if batch_gradient is None else self.step(index, x, y)
        loss = self.full_loss(step) if batch_gradient is None else batch_gradient(step)
        if self.bench.checks_each_step:
            require_finite(self, loss.detach(), index + 1)
        if batch_gradient is None:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        return step, loss

    def train_on(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        """Take one training step and return its loss."""
        assert self.optimizer is not None
        step, loss = self.backward(index, x, y)
        for rule in self.bench.method.gradients:
            rule(step)
        self.optimizer.step()
        return loss.detach()

    def finish(self, extras: Mapping[str, Any]) -> Payload:
        """Store the entries that stay at the client, and return the upload."""
        self.stage = "uploading"
        state = {**self.bench.live, **self.optimizer_entries()}
        self.state.entries |= {name: state[name].detach().to(CPU, copy=True) for name in self.phase.kept if name in state}
        entries: Mapping[str, Tensor] = {name: state[name].detach().clone() for name in self.phase.up if name in state}
        for change in self.bench.method.uploads:
            entries = change(self, entries)
        if self.bench.device == CPU:
            return Payload(entries, extras)
        self.state.memory = moved(self.state.memory, CPU)
        return Payload(moved(entries, CPU), moved(extras, CPU))

    def brought(self, tree: T) -> T:
        """Return the same values, with every tensor on the workbench's device."""
        return tree if self.bench.device == CPU else moved(tree, self.bench.device)


def batch_indices(
    count: int, settings: Settings, needs_two: bool, stream: torch.Generator, client: str, labels: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the positions of each training batch: shuffled epochs, or samples drawn uniformly over the given labels."""
    # Draw with replacement, so that all classes that occur are equally likely.
    chances = None if labels is None else 1 / labels.bincount()[labels].double()
    steps = epoch = 0
    while settings.local_steps is not None or epoch < settings.local_epochs:
        epoch += 1
        if chances is None:
            order = torch.randperm(count, generator=stream)
        else:
            order = torch.multinomial(chances, count, replacement=True, generator=stream)
        for chunk in _epoch(order, settings, needs_two, client):
            if settings.local_steps is not None and steps == settings.local_steps:
                return
            steps += 1
            yield chunk


def _epoch(order: Tensor, settings: Settings, needs_two: bool, client: str) -> list[Tensor]:
    chunks = list(torch.split(order, settings.batch_size))
    if not needs_two or len(chunks[-1]) > 1 or settings.last_batch == "keep":
        return chunks
    if settings.last_batch == "error" or len(chunks) == 1:
        raise DataError(
            f"Client {client}: the last batch has one sample ({len(order)} samples, batch size {settings.batch_size}), but batch norm "
            "needs at least two. Use --last-batch merge or drop, a different batch size, or a different norm."
        )
    if settings.last_batch == "merge":
        chunks[-2:] = [torch.cat(chunks[-2:])]
    else:
        chunks.pop()
    return chunks


def train(client: Client, payload: Payload) -> Payload:
    """Run the local training loop: receive, train, upload."""
    extras = begin_training(client, payload)
    total = torch.zeros((), device=client.bench.device)
    index = -1
    take_step = client.bench.own_step or Client.train_on
    for index, (x, y) in enumerate(client.batches()):
        total += take_step(client, index, x, y)
    reply = end_training(client, extras, total, index + 1)
    give_back_much()
    return reply


def begin_training(client: Client, payload: Payload) -> dict[str, Any]:
    """Prepare the client for training. Return the extras of its ``before_training`` hooks."""
    client.extras = client.brought(payload.extras)
    client.receive(payload.entries)
    client.model.train()
    extras: dict[str, Any] = {}
    client.stage = "before_training"
    for hook in client.bench.method.before_training:
        extras |= hook(client) or {}
    client.optimizer = client.make_optimizer()
    client.stage = "training"
    return extras


def end_training(client: Client, extras: dict[str, Any], total: Tensor, steps: int) -> Payload:
    """Check the summed loss, and return the upload."""
    require_finite(client, total, steps)
    client.stage = "after_training"
    for hook in client.bench.method.after_training:
        extras |= hook(client) or {}
    client.loss = None if client.bench.method.facts.withholds_loss else float(total) / steps
    return client.finish(extras)


def require_finite(client: Client, loss: Tensor, steps: int) -> None:
    """Raise ``NotFinite`` if the loss is NaN or infinite after ``steps`` steps, unless the method withholds the loss."""
    if not client.bench.method.facts.withholds_loss and not torch.isfinite(loss):
        when = f"step {steps}" if client.bench.checks_each_step else f"one of its {steps} steps"
        remedy = f"Lower the learning rate (try --lr {client.bench.settings.lower_lr:g}), clip the gradients, or drop such clients"
        raise NotFinite(f"the loss became {float(loss)} ({when}). {remedy} with --on-nan drop.", client.id, client.round)


def evaluate(client: Client, payload: Payload) -> Payload:
    """Score this client's model on its test (or validation) data, by domain."""
    client.receive(payload.entries)
    in_detail = bool(payload.extras.get("detail", False))
    scores = {}
    for domain, examples in scored_parts(client.data, payload.extras.get("split", "test")).items():
        found = score(client.bench, examples, in_detail)
        client.bench.note_answers("seen", client.id, domain, found)
        scores[domain] = found.results()
    return Payload(extras={"scores": scores})


def scored_parts(data: ClientData, split: str) -> Mapping[str, Examples]:
    """Return the examples that a client is scored on, by domain."""
    if split != "validation":
        return data.tests
    if data.validation is None or not len(data.validation):
        raise DataError(f"Client {data.id} has no validation data. Use a data set or a partition with a validation split.")
    return {"+".join(data.domains): data.validation}


def local_validation(client: Client) -> float | None:
    """Score a client's trained model on its validation data with the run's metric, if this score selects the round."""
    bench, validation = client.bench, client.data.validation
    if bench.settings.selection != "best_local_validation" or validation is None:
        return None
    with failures_named(client, "validation"):
        scores = score(bench, validation, in_detail=bench.measure in IN_DETAIL)
        if bench.measure == bench.task.main_measure:
            return scores.main
        return value_by(bench.measure, scores.results(), client.id)


@torch.no_grad()
def score(bench: Workbench, examples: Examples, in_detail: bool = False) -> TaskScores:
    """Score the resident model on the given examples; ``in_detail`` includes the expensive metrics."""
    scores = bench.task.scores(bench.classes, in_detail)
    bench.model.eval()
    for x, y in in_batches(examples, bench.test_batch_size):
        scores.add(predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU), y)
    return scores


def predicted(bench: Workbench, x: Tensor) -> Tensor:
    """Return the predictions for preprocessed inputs, by the method's ``predict`` slot if it is filled."""
    with precision(bench.settings.amp, bench.device):
        if bench.method.predict is not None:
            return bench.method.predict(bench.model, x)
        outputs: Tensor = bench.model(x)
    return bench.task.predicted(outputs.float() if bench.settings.amp != "off" else outputs)


def give_entries(client: Client, payload: Payload) -> Payload:
    """Return this client's values of the requested entries."""
    names, own = payload.extras["names"], client.state.entries
    untrained = bool(names) and not any(name in own for name in names)
    return Payload({name: own.get(name, client.bench.initial[name]).clone() for name in names}, {"untrained": untrained})


ANSWERS: Mapping[str, Answer] = {"train": train, "evaluate": evaluate, "entries": give_entries}


def answer(client: Client, what: str, payload: Payload) -> Payload:
    """Reply to a request, in the client's random stream. An error names the client and the stage."""
    handler = {**ANSWERS, **client.bench.method.answers}[what]
    seed, device = client.bench.settings.seed, client.bench.device
    with failures_named(client, what), default_stream(seed, "answer", client.round, client.id, device=device):
        return handler(client, payload) or Payload()


@contextmanager
def failures_named(client: Client, what: str) -> Iterator[None]:
    """Add the client, round and stage to errors raised inside the block."""
    try:
        yield
    except (ClientFailure, DataError):
        raise
    except Exception as error:
        where = f"Client {client.id}, round {client.round}, request {what!r}, stage {client.stage!r}"
        raise ClientFailure(f"{where}: {type(error).__name__}: {error}") from error
