"""The workloads of all contenders, and the hand-written loop that they are compared with.

A work is a federation of random arrays, a model and the sizes of a round. All contenders build it from here, so that model, data,
batch sizes, number of steps, optimizer and weights are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.models import models

CLASSES = 10
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Work:
    """The sizes of a workload. ``warm_ups`` rounds run first and are not measured; a turn is several rounds, whose mean is measured."""

    letter: str
    title: str
    model: str
    clients: int
    a_round: int
    samples: int
    batch: int
    size: int = 28
    warm_ups: int = 1
    rounds_a_turn: int = 1
    shared_data: bool = False

    @property
    def sampled(self) -> bool:
        """Return True if only some clients take part in a round."""
        return self.a_round < self.clients


WORKS = {
    work.letter: work
    for work in (
        Work(
            "a",
            "small CNN with batch norm, 10 of 100 clients, 72 samples, batch 4",
            "small_cnn(width=64)",
            100,
            10,
            72,
            4,
            warm_ups=2,
            rounds_a_turn=8,
        ),
        Work("b", "six-layer CNN, 5 clients, 743 samples, batch 32", "six_layer_cnn", 5, 5, 743, 32),
        Work("c", "small CNN with batch norm, 100 of 1,000 clients, 37 samples, batch 2", "small_cnn(width=64)", 1000, 100, 37, 2),
        Work("d", "ResNet-18 at 64x64, 4 clients, 256 samples, batch 32", "resnet18", 4, 4, 256, 32, size=64),
        Work(
            "e1",
            "0.1 M parameters, 4 clients, 2 samples, one step",
            "small_cnn(width=64)",
            4,
            4,
            2,
            2,
            warm_ups=2,
            rounds_a_turn=20,
        ),
        Work(
            "e2", "1 M parameters, 4 clients, 2 samples, one step", "small_cnn(width=204)", 4, 4, 2, 2, warm_ups=2, rounds_a_turn=20
        ),
        Work("e3", "14 M parameters, 4 clients, 2 samples, one step", "six_layer_cnn", 4, 4, 2, 2, rounds_a_turn=5),
        Work("e4", "57 M parameters, 4 clients, 2 samples, one step", "alexnet_fedwon", 4, 4, 2, 2, size=64),
    )
}
SPEED_WORKS = ("a", "b", "c", "d")
SIZE_WORKS = ("e1", "e2", "e3", "e4")


def tiny(work: Work) -> Work:
    """Return a workload that takes a fraction of a second, for tests."""
    if work.letter.startswith("e"):
        return dataclasses.replace(work, clients=2, a_round=2, warm_ups=1)
    a_round = 3 if work.sampled else 2
    batch = min(work.batch, 4)
    odd = work.samples % work.batch == 1
    model = "small_cnn(width=8)" if "small_cnn" in work.model else work.model
    return dataclasses.replace(
        work,
        model=model,
        clients=6 if work.sampled else 2,
        a_round=a_round,
        samples=2 * batch + odd,
        batch=batch,
        warm_ups=1,
        rounds_a_turn=1,
    )


def chosen(letter: str, quick: bool = False) -> Work:
    """A work by its letter."""
    if letter not in WORKS:
        raise SystemExit(f"There is no workload {letter!r}. Choose from: {', '.join(WORKS)}.")
    return tiny(WORKS[letter]) if quick else WORKS[letter]


def client_name(index: int) -> str:
    """The id of a client."""
    return f"c{index:05d}"


def examples(work: Work, index: int) -> ArrayExamples:
    """The random images of one client; with ``shared_data``, all clients have the same ones, so that they do not affect the memory."""
    stream = torch.Generator().manual_seed(0 if work.shared_data else index)
    x = torch.randint(0, 256, (work.samples, 3, work.size, work.size), dtype=torch.uint8, generator=stream)
    return ArrayExamples(x, torch.randint(0, CLASSES, (work.samples,), generator=stream))


def federation(work: Work) -> Federation:
    """All clients of a work."""
    same = examples(work, 0)
    made = []
    for index in range(work.clients):
        held = same if work.shared_data else examples(work, index)
        made.append(ClientData(client_name(index), ("d",), held, {"d": ArrayExamples(held.x[:2], held.y[:2])}))
    return Federation("random", tuple(map(str, range(CLASSES))), tuple(made))


def build_model(work: Work) -> nn.Module:
    """The model of a work, with the same initial values for every contender."""
    torch.manual_seed(0)
    return models.build(work.model, classes=CLASSES, input_shape=(3, work.size, work.size))


def prepared(x: Tensor) -> Tensor:
    """Images as the model takes them."""
    return x.float().div_(255).sub_(0.5).div_(0.5)


def batch_positions(count: int, batch: int) -> list[Tensor]:
    """Yield shuffled positions in batches. A last batch of one sample joins the previous one, because batch norm needs two."""
    chunks = list(torch.randperm(count).split(batch))
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def train_client(model: nn.Module, held: ArrayExamples, positions: Iterable[Tensor]) -> None:
    """Train one local epoch with plain SGD, as in a notebook."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for chunk in positions:
        x, y = held.batch(chunk)
        loss = nn.functional.cross_entropy(model(prepared(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def hand_written_round(
    model: nn.Module, state: dict[str, Tensor], clients: Sequence[ClientData], positions: Callable[[ClientData], Iterable[Tensor]]
) -> dict[str, Tensor]:
    """A round of federated averaging by hand, with one resident model."""
    total = sum(len(client.train) for client in clients)
    average: dict[str, Tensor] = {}
    for client in clients:
        model.load_state_dict(state)
        assert isinstance(client.train, ArrayExamples)
        train_client(model, client.train, positions(client))
        share = len(client.train) / total
        for name, value in model.state_dict().items():
            if not value.is_floating_point():
                average[name] = value.clone()
            elif name in average:
                average[name].add_(value, alpha=share)
            else:
                average[name] = value * share
    return average
