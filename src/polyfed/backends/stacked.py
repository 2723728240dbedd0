"""Several clients as one: their tensors stacked, their training steps taken together.

Each client is a row of every tensor. ``torch.func.vmap`` runs the forward pass, the loss and the method's own terms and rules as they
are written for one client; plain autograd then gives the gradient of the summed loss, of which each row belongs to one client only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from polyfed.core.client import Client, Step, begin_training, end_training, failures_named
from polyfed.core.rounds import Payload
from polyfed.core.seeds import derive
from polyfed.core.workbench import ClientState, Workbench, make_optimizer

Key: TypeAlias = "tuple[Any, ...]"
PLAIN = (int, float, str, bool, type(None))


class CannotStack(Exception):
    """Something that a step needs differs between clients in a way that tensors cannot hold."""


class Stream:
    """A client's random numbers, which are left and taken up again while other clients have theirs."""

    def __init__(self, client: Client) -> None:
        started = torch.Generator().manual_seed(derive(client.bench.settings.seed, "answer", client.round, client.id))
        self.state = started.get_state()

    @contextmanager
    def taken_up(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()


class Trainee:
    """A client between the beginning of its training and its end, with its values kept outside the resident model."""

    def __init__(self, client: Client, payload: Payload) -> None:
        self.client, self.bench = client, client.bench
        self.stream = Stream(client)
        with self.at_work():
            self.extras = begin_training(client, payload)
        self.values = {name: value.detach().clone() for name, value in self.bench.live.items()}
        self.modes = Modes(self.bench.model)
        self.batches = client.batches()
        method, preparation = self.bench.method, self.bench.preparation
        self.draws = bool(method.inputs) or getattr(preparation, "augment", None) is not None
        self.seen = seen_by(client)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside the block, random numbers and failures are this client's."""
        with failures_named(self.client, "train"), self.stream.taken_up():
            yield

    @property
    def key(self) -> Key:
        """Clients with equal keys can be stacked, where their batches are of equal size too."""
        leaves, structure = pytree.tree_flatten(self.seen)
        assert self.client.optimizer is not None
        state = self.client.optimizer.state
        buffers = tuple(
            (name, buffer, float(value) if value.dim() == 0 else None)
            for name, parameter in self.bench.parameters.items()
            for buffer, value in state.get(parameter, {}).items()
        )
        return self.modes.flags, buffers, str(structure), tuple(_likeness(leaf) for leaf in leaves)

    def next_batch(self) -> tuple[Tensor, Tensor] | None:
        """The next training batch; None after the last."""
        if not self.draws:
            return next(self.batches, None)
        with self.at_work():
            return next(self.batches, None)

    def end(self, values: Mapping[str, Tensor], buffers: Mapping[str, Mapping[str, Tensor]], total: Tensor, steps: int) -> Payload:
        """Take the trained values over into the resident model, and answer from there."""
        client, bench = self.client, self.bench
        assert client.optimizer is not None
        with self.at_work():
            self.modes.restore()
            bench.load(values)
            for name, state in buffers.items():
                client.optimizer.state[bench.parameters[name]] = dict(state)
            return end_training(client, self.extras, total, steps)


class Modes:
    """Which modules are in training mode and which parameters are trained, as a client's hooks have left them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        self.flags = tuple(m.training for m in self.modules), tuple(p.requires_grad for p in self.parameters)

    def restore(self) -> None:
        for module, training in zip(self.modules, self.flags[0], strict=True):
            module.training = training
        for parameter, trained in zip(self.parameters, self.flags[1], strict=True):
            parameter.requires_grad_(trained)


Seen: TypeAlias = "tuple[Any, Any, Any, Any]"


def seen_by(client: Client) -> Seen:
    """What a method's hooks may read of a client in a step: received, extras, kept entries, memory; nothing if it has no such hooks."""
    method = client.bench.method
    if not (method.objective or method.gradients or method.task_loss):
        return {}, {}, {}, {}
    return dict(client.received), dict(client.extras), client.state.entries, client.state.memory


def _likeness(leaf: object) -> object:
    """What must be the same in two clients that are stacked."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else id(leaf)


class PlaceholderClient(Client):
    """All clients of a stack as a method's hooks see them: one client, whose tensors stand for a row each."""

    def __init__(self, bench: Workbench, like: Client, seen: Seen) -> None:
        self.bench, self.round, self.attempt = bench, like.round, like.attempt
        self.received, self.extras = seen[0], seen[1]
        self.state = ClientState(seen[2], seen[3])
        self.optimizer, self.loss, self.stage = None, None, "training"

    def __getattr__(self, name: str) -> Any:
        raise CannotStack(f"it reads client.{name}, which is another one for each client")


class TimelessStep(Step):
    """A step that does not tell its number."""

    __slots__ = ()

    @property
    def index(self) -> int:
        raise CannotStack("it looks at the number of the step")

    @index.setter
    def index(self, number: int) -> None:
        pass


class TimelessPlaceholder(PlaceholderClient):
    """A placeholder that knows neither round nor step: what is done with it can be repeated in any other."""

    @property
    def round(self) -> int:
        raise CannotStack("it looks at the number of the round")

    @round.setter
    def round(self, number: int) -> None:
        pass

    def step(self, index: int, x: Tensor, y: Tensor) -> Step:
        return TimelessStep(self, index, x, y)


def stacked_leaves(trainees: Sequence[Trainee]) -> tuple[list[Any], list[int | None], pytree.TreeSpec]:
    """What the hooks of all clients see, and along which axis: what differs is stacked, what all share is left as it is (None)."""
    flat = [pytree.tree_flatten(trainee.seen) for trainee in trainees]
    leaves: list[Any] = []
    axes: list[int | None] = []
    for row in zip(*(leaves_of_one for leaves_of_one, _ in flat), strict=True):
        shared = not isinstance(row[0], Tensor) or all(leaf is row[0] for leaf in row)
        leaves.append(row[0] if shared else torch.stack(row))
        axes.append(None if shared else 0)
    return leaves, axes, flat[0][1]


def other_entries(bench: Workbench) -> dict[str, Tensor]:
    """Entries that are not trained. A second name of a parameter is left out: its first name stands for both."""
    trained = {id(parameter) for parameter in bench.parameters.values()}
    return {name: value for name, value in bench.live.items() if id(value) not in trained}


class Rows:
    """Tensors that a step trains, and the functions that work out its losses and gradients; of one client or of many."""

    bench: Workbench
    like: Client
    parameters: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    leaves: list[Any]
    structure: pytree.TreeSpec
    optimizer: torch.optim.Optimizer
    key: Key
    together: Callable[..., Tensor]
    ruled: Callable[..., dict[str, Tensor]]
    kind_of_stand_in: type[PlaceholderClient] = PlaceholderClient

    def stand_in(self, tensors: dict[str, Tensor], parameters: dict[str, Tensor], leaves: list[Any]) -> PlaceholderClient:
        """The client that hooks see: its bench shows one row of each tensor."""
        bench = copy.copy(self.bench)
        bench.live, bench.parameters = tensors, parameters  # type: ignore[assignment]
        return self.kind_of_stand_in(bench, self.like, pytree.tree_unflatten(leaves, self.structure))

    def loss_of_one(
        self, parameters: dict[str, Tensor], others: dict[str, Tensor], leaves: list[Any], index: int, x: Tensor, y: Tensor
    ) -> Tensor:
        """The loss of one client, as it is worked out when a client trains by itself."""
        tensors = {**parameters, **others}
        client = self.stand_in(tensors, parameters, leaves)
        with _reparametrize_module(self.bench.model, tensors, tie_weights=True):
            return client.full_loss(client.forward(index, x, y))

    def rules_of_one(
        self,
        parameters: dict[str, Tensor],
        gradients: dict[str, Tensor],
        others: dict[str, Tensor],
        leaves: list[Any],
        index: int,
        x: Tensor,
        y: Tensor,
    ) -> dict[str, Tensor]:
        """The gradients of one client after the method's rules."""
        tensors = {**parameters, **others}
        client = self.stand_in(tensors, parameters, leaves)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        with _reparametrize_module(self.bench.model, tensors, tie_weights=True):
            for rule in self.bench.method.gradients:
                rule(client.step(index, x, y))
        return {name: _present(parameters[name].grad, name) for name in gradients}

    @torch.no_grad()
    def apply_rules(self, index: int, x: Tensor, y: Tensor) -> None:
        """Change the gradients as the method says."""
        values = {name: rows.detach() for name, rows in self.parameters.items()}
        gradients = {name: rows.grad for name, rows in self.parameters.items() if rows.grad is not None}
        for name, changed in self.ruled(values, gradients, self.others, self.leaves, index, x, y).items():
            self.parameters[name].grad = changed

    @contextmanager
    def timeless(self) -> Iterator[None]:
        """Inside the block a hook that looks at the number of the round or of the step is an error."""
        self.kind_of_stand_in = TimelessPlaceholder
        try:
            yield
        finally:
            self.kind_of_stand_in = PlaceholderClient


class Single(Rows):
    """One client that trains by itself, in the resident model itself."""

    def __init__(self, client: Client) -> None:
        assert client.optimizer is not None
        self.client, self.bench, self.like, self.optimizer = client, client.bench, client, client.optimizer
        self.parameters = dict(self.bench.parameters)
        self.others = other_entries(self.bench)
        self.leaves, self.structure = pytree.tree_flatten(seen_by(client))
        self.together, self.ruled = self.loss_of_one, self.rules_of_one
        self.key = (0, Modes(self.bench.model).flags, str(self.structure), tuple(_likeness(leaf) for leaf in self.leaves))

    def apply_rules(self, index: int, x: Tensor, y: Tensor) -> None:
        for rule in self.bench.method.gradients:
            rule(self.client.step(index, x, y))


class Stack(Rows):
    """The tensors of some clients, and the step that trains all of them."""

    def __init__(self, trainees: Sequence[Trainee]) -> None:
        first = trainees[0]
        self.trainees, self.bench, self.like = trainees, first.bench, first.client
        self.key = (len(trainees), first.key)
        first.modes.restore()
        self.parameters = {
            name: torch.stack([trainee.values[name] for trainee in trainees]).requires_grad_(parameter.requires_grad)
            for name, parameter in self.bench.parameters.items()
        }
        self.others = {name: torch.stack([trainee.values[name] for trainee in trainees]) for name in other_entries(self.bench)}
        self.optimizer = self._optimizer()
        self.leaves, axes, self.structure = stacked_leaves(trainees)
        self.together = vmap(self.loss_of_one, in_dims=(0, 0, axes, None, 0, 0), randomness="error")
        self.ruled = vmap(self.rules_of_one, in_dims=(0, 0, 0, axes, None, 0, 0), randomness="error")

    def _optimizer(self) -> torch.optim.Optimizer:
        """One optimizer for all rows: every optimizer here works number by number."""
        made = make_optimizer(self.bench.settings, self.parameters.values(), self.like.lr)  # type: ignore[arg-type]
        states = [trainee.client.optimizer.state for trainee in self.trainees if trainee.client.optimizer is not None]
        for name, rows in self.parameters.items():
            parameter = self.bench.parameters[name]
            for buffer, value in states[0].get(parameter, {}).items():
                buffers = [state[parameter][buffer] for state in states]
                made.state[rows][buffer] = torch.stack(buffers) if value.dim() else value.clone()
        return made

    def train_on(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        """One step of every client; returns their losses."""
        with warnings.catch_warnings():
            # An operation without a stacked form of its own is done row by row: slower, and right.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            losses = self.together(self.parameters, self.others, self.leaves, index, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self.bench.method.gradients:
            self.apply_rules(index, x, y)
        self.optimizer.step()
        return losses.detach()

    def train(self, steps: Step_ | None = None) -> list[tuple[Trainee, Tensor, int]]:
        """All steps of all clients; returns each with its summed loss and the number of its steps."""
        take = steps or self.train_on
        totals = torch.zeros(len(self.trainees), device=self.bench.device)
        index = -1
        while True:
            batches = [trainee.next_batch() for trainee in self.trainees]
            taken = [batch for batch in batches if batch is not None]
            if not taken:
                return [(trainee, total, index + 1) for trainee, total in zip(self.trainees, totals, strict=True)]
            if len(taken) < len(batches):
                raise CannotStack("its clients have different numbers of steps")
            index += 1
            x, y = torch.stack([x for x, _ in taken]), torch.stack([y for _, y in taken])
            totals += take(index, x, y)

    def row(self, place: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        values = {name: rows.detach()[place] for name, rows in (*self.parameters.items(), *self.others.items())}
        buffers = {
            name: {buffer: value[place] if value.dim() else value.clone() for buffer, value in self.optimizer.state[rows].items()}
            for name, rows in self.parameters.items()
            if rows in self.optimizer.state
        }
        return values, buffers


Step_: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]


def _present(gradient: Tensor | None, name: str) -> Tensor:
    if gradient is None:
        raise CannotStack(f"it takes the gradient of {name} away")
    return gradient
