"""Train several clients together, with their tensors stacked.

Each client is a row of every tensor. ``torch.func.vmap`` runs the forward pass, the loss and the method's terms and rules, which are
written for one client. Autograd then differentiates the summed loss; each row of the gradient depends on one client only.
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
TakeStep: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
PLAIN = (int, float, str, bool, type(None))


class CannotStack(Exception):
    """A step needs a value that differs between clients and is not a tensor."""


class Stream:
    """A client's random stream, which is suspended while other clients use theirs."""

    def __init__(self, client: Client) -> None:
        generator = torch.Generator().manual_seed(derive(client.bench.settings.seed, "answer", client.round, client.id))
        self.state = generator.get_state()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()


class Trainee:
    """A client during training, with its values outside the resident model."""

    def __init__(self, client: Client, payload: Payload) -> None:
        self.client, self.bench = client, client.bench
        self.stream = Stream(client)
        with self.active():
            self.extras = begin_training(client, payload)
        self.values = {name: value.detach().clone() for name, value in self.bench.live.items()}
        self.modes = Modes(self.bench.model)
        self.batches = client.batches()
        method, preparation = self.bench.method, self.bench.preparation
        self.draws = bool(method.inputs) or getattr(preparation, "augment", None) is not None
        self.inputs = hook_inputs(client)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, use this client's random stream, and name the client in errors."""
        with failures_named(self.client, "train"), self.stream.resumed():
            yield

    @property
    def key(self) -> Key:
        """Clients with equal keys and equal batch sizes can be stacked."""
        leaves, structure = pytree.tree_flatten(self.inputs)
        assert self.client.optimizer is not None
        state = self.client.optimizer.state
        buffers = tuple(
            (name, buffer, float(value) if value.dim() == 0 else None)
            for name, parameter in self.bench.parameters.items()
            for buffer, value in state.get(parameter, {}).items()
        )
        return self.modes.flags, buffers, str(structure), tuple(_leaf_key(leaf) for leaf in leaves)

    def next_batch(self) -> tuple[Tensor, Tensor] | None:
        if not self.draws:
            return next(self.batches, None)
        with self.active():
            return next(self.batches, None)

    def end(self, values: Mapping[str, Tensor], buffers: Mapping[str, Mapping[str, Tensor]], total: Tensor, steps: int) -> Payload:
        """Load the trained values into the resident model, and return the client's reply."""
        client, bench = self.client, self.bench
        assert client.optimizer is not None
        with self.active():
            self.modes.restore()
            bench.load(values)
            for name, state in buffers.items():
                client.optimizer.state[bench.parameters[name]] = dict(state)
            return end_training(client, self.extras, total, steps)


class Modes:
    """The training mode of each module and ``requires_grad`` of each parameter, as set by a client's hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        self.flags = tuple(m.training for m in self.modules), tuple(p.requires_grad for p in self.parameters)

    def restore(self) -> None:
        for module, training in zip(self.modules, self.flags[0], strict=True):
            module.training = training
        for parameter, trained in zip(self.parameters, self.flags[1], strict=True):
            parameter.requires_grad_(trained)


HookInputs: TypeAlias = "tuple[Any, Any, Any, Any]"


def hook_inputs(client: Client) -> HookInputs:
    """Return the client values that hooks may read in a step: received, extras, local entries, memory. Empty without such hooks."""
    method = client.bench.method
    if not (method.objective or method.gradients or method.task_loss):
        return {}, {}, {}, {}
    return dict(client.received), dict(client.extras), client.state.entries, client.state.memory


def _leaf_key(leaf: object) -> object:
    """Return the properties of a leaf that must be equal for two clients to be stacked."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else id(leaf)


class PlaceholderClient(Client):
    """The client that hooks receive: it represents all clients of a stack, and each of its tensors is one row of a stack."""

    def __init__(self, bench: Workbench, like: Client, inputs: HookInputs) -> None:
        self.bench, self.round, self.attempt = bench, like.round, like.attempt
        self.received, self.extras = inputs[0], inputs[1]
        self.state = ClientState(inputs[2], inputs[3])
        self.optimizer, self.loss, self.stage = None, None, "training"

    def __getattr__(self, name: str) -> Any:
        raise CannotStack(f"it reads client.{name}, which differs between clients")


class TimelessStep(Step):
    """A step without a number."""

    __slots__ = ()

    @property
    def index(self) -> int:
        raise CannotStack("it reads the step number")

    @index.setter
    def index(self, number: int) -> None:
        pass


class TimelessPlaceholder(PlaceholderClient):
    """A placeholder without round and step numbers, so that a trace of it is valid for all rounds and steps."""

    @property
    def round(self) -> int:
        raise CannotStack("it reads the round number")

    @round.setter
    def round(self, number: int) -> None:
        pass

    def step(self, index: int, x: Tensor, y: Tensor) -> Step:
        return TimelessStep(self, index, x, y)


def stacked_leaves(trainees: Sequence[Trainee]) -> tuple[list[Any], list[int | None], pytree.TreeSpec]:
    """Return the hook inputs of all clients with their vmap axes: values that differ are stacked (0), shared ones are not (None)."""
    flat = [pytree.tree_flatten(trainee.inputs) for trainee in trainees]
    leaves: list[Any] = []
    axes: list[int | None] = []
    for row in zip(*(client_leaves for client_leaves, _ in flat), strict=True):
        shared = not isinstance(row[0], Tensor) or all(leaf is row[0] for leaf in row)
        leaves.append(row[0] if shared else torch.stack(row))
        axes.append(None if shared else 0)
    return leaves, axes, flat[0][1]


def other_entries(bench: Workbench) -> dict[str, Tensor]:
    """Return the entries that are not trained. The second name of a tied parameter is omitted."""
    trained = {id(parameter) for parameter in bench.parameters.values()}
    return {name: value for name, value in bench.live.items() if id(value) not in trained}


class Rows:
    """The tensors that a step trains, and the functions that compute its losses and gradients, for one or many clients."""

    bench: Workbench
    like: Client
    parameters: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    leaves: list[Any]
    structure: pytree.TreeSpec
    optimizer: torch.optim.Optimizer
    key: Key
    all_losses: Callable[..., Tensor]
    all_gradients: Callable[..., dict[str, Tensor]]
    placeholder_class: type[PlaceholderClient] = PlaceholderClient

    def placeholder(self, tensors: dict[str, Tensor], parameters: dict[str, Tensor], leaves: list[Any]) -> PlaceholderClient:
        """Return the client that hooks receive, with one row of each tensor."""
        bench = copy.copy(self.bench)
        bench.live, bench.parameters = tensors, parameters  # type: ignore[assignment]
        return self.placeholder_class(bench, self.like, pytree.tree_unflatten(leaves, self.structure))

    def client_loss(
        self, parameters: dict[str, Tensor], others: dict[str, Tensor], leaves: list[Any], index: int, x: Tensor, y: Tensor
    ) -> Tensor:
        """Compute the loss of one client in the same way as without stacking."""
        tensors = {**parameters, **others}
        client = self.placeholder(tensors, parameters, leaves)
        with _reparametrize_module(self.bench.model, tensors, tie_weights=True):
            return client.full_loss(client.forward(index, x, y))

    def client_gradients(
        self,
        parameters: dict[str, Tensor],
        gradients: dict[str, Tensor],
        others: dict[str, Tensor],
        leaves: list[Any],
        index: int,
        x: Tensor,
        y: Tensor,
    ) -> dict[str, Tensor]:
        """Apply the method's gradient rules to the gradients of one client."""
        tensors = {**parameters, **others}
        client = self.placeholder(tensors, parameters, leaves)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        with _reparametrize_module(self.bench.model, tensors, tie_weights=True):
            for rule in self.bench.method.gradients:
                rule(client.step(index, x, y))
        changed = {name: parameters[name].grad for name in gradients}
        if removed := next((name for name, gradient in changed.items() if gradient is None), None):
            raise CannotStack(f"it removes the gradient of {removed}")
        return changed  # type: ignore[return-value]

    @torch.no_grad()
    def apply_rules(self, index: int, x: Tensor, y: Tensor) -> None:
        """Apply the method's gradient rules to all rows."""
        values = {name: rows.detach() for name, rows in self.parameters.items()}
        gradients = {name: rows.grad for name, rows in self.parameters.items() if rows.grad is not None}
        for name, changed in self.all_gradients(values, gradients, self.others, self.leaves, index, x, y).items():
            self.parameters[name].grad = changed

    @contextmanager
    def timeless(self) -> Iterator[None]:
        """Raise an error inside the block if a hook reads the round or step number."""
        self.placeholder_class = TimelessPlaceholder
        try:
            yield
        finally:
            self.placeholder_class = PlaceholderClient


class Single(Rows):
    def __init__(self, client: Client) -> None:
        assert client.optimizer is not None
        self.client, self.bench, self.like, self.optimizer = client, client.bench, client, client.optimizer
        self.parameters = dict(self.bench.parameters)
        self.others = other_entries(self.bench)
        self.leaves, self.structure = pytree.tree_flatten(hook_inputs(client))
        self.all_losses, self.all_gradients = self.client_loss, self.client_gradients
        self.key = (0, Modes(self.bench.model).flags, str(self.structure), tuple(_leaf_key(leaf) for leaf in self.leaves))

    def apply_rules(self, index: int, x: Tensor, y: Tensor) -> None:
        for rule in self.bench.method.gradients:
            rule(self.client.step(index, x, y))


class Stack(Rows):
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
        self.optimizer = self._make_optimizer()
        self.leaves, axes, self.structure = stacked_leaves(trainees)
        self.all_losses = vmap(self.client_loss, in_dims=(0, 0, axes, None, 0, 0), randomness="error")
        self.all_gradients = vmap(self.client_gradients, in_dims=(0, 0, 0, axes, None, 0, 0), randomness="error")

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Build one optimizer for all rows. This is correct because all supported optimizers work element by element."""
        optimizer = make_optimizer(self.bench.settings, self.parameters.values(), self.like.lr)  # type: ignore[arg-type]
        states = [trainee.client.optimizer.state for trainee in self.trainees if trainee.client.optimizer is not None]
        for name, rows in self.parameters.items():
            parameter = self.bench.parameters[name]
            for buffer, value in states[0].get(parameter, {}).items():
                buffers = [state[parameter][buffer] for state in states]
                optimizer.state[rows][buffer] = torch.stack(buffers) if value.dim() else value.clone()
        return optimizer

    def train_on(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Operations without a batching rule run row by row: slower, but correct.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            losses = self.all_losses(self.parameters, self.others, self.leaves, index, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self.bench.method.gradients:
            self.apply_rules(index, x, y)
        self.optimizer.step()
        return losses.detach()

    def train(self, step: TakeStep | None = None) -> list[tuple[Trainee, Tensor, int]]:
        """Train all clients, and return each one with its summed loss and its number of steps."""
        step = step or self.train_on
        totals = torch.zeros(len(self.trainees), device=self.bench.device)
        index = -1
        while True:
            batches = [trainee.next_batch() for trainee in self.trainees]
            present = [batch for batch in batches if batch is not None]
            if not present:
                return [(trainee, total, index + 1) for trainee, total in zip(self.trainees, totals, strict=True)]
            if len(present) < len(batches):
                raise CannotStack("its clients have different numbers of steps")
            index += 1
            x, y = torch.stack([x for x, _ in present]), torch.stack([y for _, y in present])
            totals += step(index, x, y)

    def row(self, place: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        values = {name: rows.detach()[place] for name, rows in (*self.parameters.items(), *self.others.items())}
        buffers = {
            name: {buffer: value[place] if value.dim() else value.clone() for buffer, value in self.optimizer.state[rows].items()}
            for name, rows in self.parameters.items()
            if rows in self.optimizer.state
        }
        return values, buffers
