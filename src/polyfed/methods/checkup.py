"""Checkup: clients answer the doctor's questions with sums over their images. Training stays as it is.

    statistics    m, v                                            batch-norm mean and variance of n images, by channel
    spread        s2 = mean_h (a_h - b_h)^2 / (1/|A_h| + 1/|B_h|)  a_h, b_h: the means of two random halves A_h, B_h of these images
    by class      n_y, sum f, sum f^2                             numbers, and features f (the input of the head)

All under the server's model. s2 / n is how much m would vary with other images of the same client. Halves pass through the network as batches of
their own: batch norm pins the mean of what follows it, so the spread of single images would be too large. Halves stay at the client.

Only ``polyfed doctor`` asks these questions (``docs/doctor.md``); no paper has this part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch_norm import estimate_statistics, layers_with_statistics
from polyfed.core.client import Client
from polyfed.core.conversation import EVALUATION, Ask, Payload, Reply, Talk
from polyfed.core.device import CPU
from polyfed.core.extras import Array, Asked, LikeEntries, Number
from polyfed.core.method import Facts, Method, register
from polyfed.core.privacy import with_class_counts
from polyfed.core.seeds import generator
from polyfed.core.server import Server
from polyfed.core.workbench import features_or_outputs
from polyfed.errors import Declined

STATISTICS, BY_CLASS = "checkup_statistics", "checkup_by_class"
HALVINGS = 4
IMAGES = 256
"""Images of a client that are looked at, at most."""
FEWEST = 8
"""Images that must go into a sum for it to leave the client. No option: the server writes the options."""


def images_looked_at(client: Client) -> Tensor:
    """Positions of some of a client's training images, by the run's seed."""
    stream = generator(client.bench.settings.seed, "doctor", "images", client.id)
    return torch.randperm(len(client.data.train), generator=stream)[:IMAGES]


def prepared(client: Client, chosen: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Batches of these images as the model takes them, with their labels; none holds a single image unless there is only one."""
    parts = list(torch.split(chosen, max(2, client.bench.settings.test_batch_size)))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    for part in parts:
        x, y = client.data.train.batch(part)
        yield client.bench.preparation.for_testing(x.to(client.bench.device)), y


def statistics_of(client: Client, chosen: Tensor) -> dict[str, Tensor]:
    """Batch-norm means and variances of these images under the client's model, by their entries."""
    estimate_statistics(client.model, (x for x, _ in prepared(client, chosen)), "samples")
    names = statistics_in(client.model)
    return {name: client.bench.live[name].detach().to(CPU, copy=True) for name in names}


def statistics_in(model: torch.nn.Module) -> list[str]:
    """The entries of all batch-norm means and variances."""
    return [f"{layer}.{which}" for layer in layers_with_statistics(model) for which in ("running_mean", "running_var")]


def means_in(model: torch.nn.Module) -> list[str]:
    """The entries of all batch-norm means."""
    return [f"{layer}.running_mean" for layer in layers_with_statistics(model)]


def tell_statistics(client: Client, payload: Payload) -> Payload:
    """A client's answer: batch-norm statistics of its images, and their spread."""
    client.receive(payload.entries)
    chosen = images_looked_at(client)
    if len(chosen) < FEWEST:
        raise Declined(f"Client {client.id} has {len(chosen)} training images; the doctor's sums need at least {FEWEST}.")
    return Payload(statistics_of(client, chosen), {"images": len(chosen), "spread": spread_of(client, chosen)})


def spread_of(client: Client, chosen: Tensor) -> dict[str, Tensor]:
    """How much the mean of these images would vary with other images, squared and times their number."""
    stream = generator(client.bench.settings.seed, "doctor", "halves", client.id)
    found: dict[str, Tensor] = {}
    for _ in range(HALVINGS):
        one, other = chosen[torch.randperm(len(chosen), generator=stream)].tensor_split(2)
        means, others = statistics_of(client, one), statistics_of(client, other)
        share = (1 / len(one) + 1 / len(other)) * HALVINGS
        for name in means_in(client.model):
            found[name] = found.get(name, 0) + (means[name] - others[name]).square() / share
    return found


@with_class_counts
@torch.no_grad()
def tell_by_class(client: Client, payload: Payload) -> Payload:
    """A client's answer: its labels, and sums of its features by class; classes with few of the images are left out of the sums."""
    client.receive(payload.entries)
    bench = client.bench
    # With the running statistics of all clients: those of a client's own batch would hide how it differs.
    bench.model.eval()
    features, labels = [], []
    for x, y in prepared(client, images_looked_at(client)):
        features.append(features_or_outputs(bench, x).to(CPU, torch.float64))
        labels.append(y)
    belongs = torch.nn.functional.one_hot(torch.cat(labels), bench.classes)
    counts, every = belongs.sum(0), torch.cat(features)
    sums = torch.stack([belongs.double().T @ every, belongs.double().T @ every.square()])
    told = counts >= FEWEST
    all_labels = torch.tensor(bench.task.class_counts(client.data.train, bench.classes))
    return Payload(extras={"labels": all_labels, "counts": counts * told, "sums": sums * told[:, None]})


def asked_of_all(server: Server, question: str, extras: Mapping[str, Any]) -> Talk[dict[str, Reply]]:
    """Ask every client one of the questions about the server's model; returns the answers of those that have one."""
    payloads = {info.id: Payload(server.outgoing(info.id), extras) for info in server.clients}
    replies = yield Ask(question, payloads, EVALUATION, server.round)
    return {reply.client: reply for reply in replies}


def entries_told(asked: Asked) -> list[str]:
    """The entries in an answer about statistics."""
    return statistics_in(asked.server.blueprint)


def spreads_told(asked: Asked) -> list[str]:
    """The entries whose spread is told."""
    return means_in(asked.server.blueprint)


def samples(asked: Asked) -> float:
    """How many training images the client has."""
    return asked.info.samples


def shape_of_sums(asked: Asked) -> tuple[int, ...]:
    """Sums and sums of squares, by class and feature, as the question says."""
    return tuple(asked.ask.payloads[asked.client].extras["shape"])


def shape_of_counts(asked: Asked) -> tuple[int, ...]:
    """A number for each class."""
    return shape_of_sums(asked)[1:2]


def no_square(sums: Tensor) -> str:
    """Why the second part cannot be sums of squares."""
    return "" if sums.numel() == 0 or float(sums[1].min()) >= 0 else "holds sums of squares below 0"


@register
def checkup() -> Method:
    """Let clients answer the doctor's questions with sums over their images; training stays as it is."""
    counts = Array(shape_of_counts, torch.int64, 0, samples)
    return Method(
        "checkup",
        answers={STATISTICS: tell_statistics, BY_CLASS: tell_by_class},
        reply_entries={STATISTICS: entries_told},
        reply_extras={
            STATISTICS: {"images": Number(FEWEST, samples, whole=True), "spread": LikeEntries(spreads_told)},
            BY_CLASS: {"labels": counts, "counts": counts, "sums": Array(shape_of_sums, torch.float64, further=no_square)},
        },
        facts=Facts(
            class_labels=True,
            data_derived_uploads="batch-norm statistics of its images with their spread, class counts, and sums of features by class, once",
            granularity="aggregate",
        ),
        standalone=False,
    )
