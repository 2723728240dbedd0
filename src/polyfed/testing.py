"""The contract every method keeps, as one function for our tests and for those of third parties.

    from polyfed.testing import check_method
    check_method("my_method(strength=0.3)")

It trains on a tiny made-up federation (three unequal clients, a model with batch norm) and takes a few seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.core.conversation import TRAINING, Ask, AskClients, Reply
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.core.method import Method, as_method, methods, parse
from polyfed.core.part import Part, declared
from polyfed.core.reply_checks import declared_extras
from polyfed.core.server import Server
from polyfed.errors import PolyfedError, TooFewReplies
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Snapshot, copied, digest
from polyfed.runs.replay import Change, Replay, mutations, with_extras, without_extra
from polyfed.settings import Settings


class ContractBroken(PolyfedError, AssertionError):
    """A method breaks a promise that all methods make."""


SIZES = {"big": 13, "middle": 8, "small": 5}


def tiny_federation(sizes: dict[str, int] | None = None, classes: int = 3) -> Federation:
    """Clients of different sizes and looks, made from nothing but a seed."""
    clients = []
    for index, (name, count) in enumerate((sizes or SIZES).items()):
        stream = torch.Generator().manual_seed(index)
        parts = []
        for size in (count, 4, 6):
            y = torch.arange(size) % classes
            noise = torch.rand(size, 3, 8, 8, generator=stream)
            x = noise + 0.4 * index + 0.5 * torch.nn.functional.one_hot(y, classes).float()[:, :3, None, None]
            parts.append(ArrayExamples((x * 100).clamp(0, 255).to(torch.uint8), y))
        train, validation, test = parts
        clients.append(ClientData(name, (name,), train, {name: test}, validation))
    return Federation("tiny", tuple(str(c) for c in range(classes)), tuple(clients), {"new": next(iter(clients[0].tests.values()))})


class TinyNet(nn.Module):
    """Two convolutions with batch norm, the second in a residual branch, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.stem(x)
        x = torch.relu(x + self.branch(x))
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def check_method(method: str | Method, model: Callable[[], nn.Module] = TinyNet) -> None:
    """Raise ContractBroken, with a sentence, unless a method keeps every promise.

    Args:
        method: its text, or a value made by a registered factory.
        model: builds a model the method can work on.
    """
    value = as_method(method)
    promises = (
        _is_written_and_read,
        _sends_what_the_plan_says,
        _stands_bad_replies,
        _repeats_to_the_bit,
        _resumes_to_the_bit,
        _declares_itself,
        _trains_as_declared,
    )
    with _random_streams_restored():
        for promise in promises:
            promise(value, model)


def _settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"data": "tiny", "rounds": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9}
    return Settings(**values | changes)


def _experiment(method: Method, model: Callable[[], nn.Module], **changes: Any) -> Experiment:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        built = model()
    return Experiment(_settings(**changes), tiny_federation(), method, built)


def _require(fulfilled: bool, method: Method, broken: str) -> None:
    if not fulfilled:
        raise ContractBroken(f"{method}: {broken}")


def _is_written_and_read(method: Method, _: Callable[[], nn.Module]) -> None:
    if not all(part.name in methods.names() for part in method.parts):
        return
    for text in (str(method), method.full_text):
        _require(str(parse(text)) == str(method), method, f"the text {text!r} reads back as {str(parse(text))!r}.")
    mirrored = " + ".join(reversed(str(method).split(" + "))) if "(" not in str(method) else str(method)
    _require(str(parse(mirrored)) == str(method), method, "the order in which it is written changes its text.")


def _watched(experiment: Experiment) -> list[tuple[Ask, list[Reply]]]:
    """Train, and note everything that travels."""
    seen: list[tuple[Ask, list[Reply]]] = []

    def watching(ask_clients: AskClients) -> AskClients:
        def watch(ask: Ask) -> Iterator[Reply]:
            replies: list[Reply] = []
            seen.append((ask, replies))
            for reply in ask_clients(ask):
                replies.append(reply)
                yield reply

        return watch

    try:
        experiment.train(through=watching)
    except TooFewReplies as error:
        refused = error
    else:
        return seen
    _check_what_travels(experiment, seen)
    raise ContractBroken(f"{experiment.method}: its replies are refused. {refused}")


def _sends_what_the_plan_says(method: Method, model: Callable[[], nn.Module]) -> None:
    experiment = _experiment(method, model)
    _check_what_travels(experiment, _watched(experiment))


def _check_what_travels(experiment: Experiment, seen: list[tuple[Ask, list[Reply]]]) -> None:
    method = experiment.method
    _check_declared(method, seen)
    compressed = any(type(declared(change)).undo is not Part.undo for change in method.uploads)
    for ask, replies in seen:
        if ask.purpose != TRAINING or ask.round == 0:
            continue
        phase = experiment.bench.plan.at(ask.round)
        local = {name for name, travel in phase.travels.items() if not travel.up and not travel.down}
        for client, payload in ask.payloads.items():
            sent = sorted(local & set(payload.entries))
            _require(not sent, method, f"round {ask.round} sends {sent[:1]} to {client}, which the plan says is local.")
            extra = sorted(set(payload.entries) - set(phase.down)) if ask.what == "train" else []
            _require(not extra, method, f"round {ask.round} sends {extra[:1]} to {client}, which the plan does not send down.")
        for reply in replies:
            came = set(reply.entries)
            _require(
                not local & came, method, f"client {reply.client} uploads {sorted(local & came)[:1]}, which the plan says is local."
            )
            if not compressed and ask.what == "train":
                strange = sorted(came - set(phase.up))
                _require(not strange, method, f"client {reply.client} uploads {strange[:1]}, which the plan does not say.")


def _check_declared(method: Method, seen: list[tuple[Ask, list[Reply]]]) -> None:
    """Every extra in a reply is declared; one that is not would be refused, and with it the reply."""
    for ask, replies in seen:
        declared = declared_extras(method, ask.what)
        for reply in replies:
            strange = sorted(set(reply.extras) - set(declared))
            _require(
                not strange,
                method,
                f"client {reply.client} sends the extra {strange[:1] and strange[0]!r} in its answer to {ask.what!r}, which reply_extras does not "
                f'declare, so its replies are refused. Declare its form: Method(reply_extras={{"{ask.what}": {{...: Number(...) or Array(...)}}}}).',
            )


def _stands_bad_replies(method: Method, model: Callable[[], nn.Module]) -> None:
    """One client's bad extra is refused, or does no harm: the run goes on, and all that the server keeps is finite."""
    replay = Replay(_experiment(method, model))
    for question, client, name in replay.extras():
        honest = replay.reply_with(question, client, name)
        bad = [("missing", without_extra(honest, name))]
        bad += [(what, with_extras(honest, {**honest.extras, name: value})) for what, value in mutations(honest.extras[name])]
        for what, reply in bad:
            said = f"a reply to {question!r} in which {name!r} is {what}"
            try:
                replay.run(_replaced(question, client, reply))
            except Exception as error:
                raise ContractBroken(
                    f"{method}: {said} stops the run ({type(error).__name__}: {error}). Declare its form more closely in reply_extras."
                ) from error
            _require(replay.is_finite(), method, f"{said} leaves values that are not finite. Declare bounds in reply_extras.")


def _replaced(question: str, client: str, bad: Reply) -> Change:
    """In every round, one client's answer to a question is another."""
    return lambda ask, reply: bad if (ask.what, reply.client) == (question, client) else reply


@contextmanager
def _random_streams_restored() -> Iterator[None]:
    """Leave the caller's random streams (Python's, NumPy's, torch's) as they were."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)


def _repeats_to_the_bit(method: Method, model: Callable[[], nn.Module]) -> None:
    digests = []
    for extra_draws in (0, 3):
        for _ in range(extra_draws):
            random.random()
            np.random.random()
            torch.rand(())
        experiment = _experiment(method, model)
        before = _random_streams()
        experiment.train()
        experiment.evaluate()
        _require(before == _random_streams(), method, "it draws from the user's own random numbers.")
        digests.append(digest(experiment.snapshot()))
    _require(
        digests[0] == digests[1],
        method,
        "the same run twice gives different weights; draw only from client.generator or torch's default stream.",
    )


def _random_streams() -> tuple[object, ...]:
    """Where the caller's random streams are."""
    name, keys, *place = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(place), torch.get_rng_state().numpy().tobytes()


def _resumes_to_the_bit(method: Method, model: Callable[[], nn.Module]) -> None:
    whole, first, resumed, repeated, both = (_experiment(method, model) for _ in range(5))
    saved: list[Snapshot] = []

    def keep_round_one(server: Server) -> None:
        if server.round == 1:
            saved.append(copied(first.snapshot()))

    whole.train()
    first.train([keep_round_one])
    resumed.restore(saved[0])
    both.restore(saved[0])
    for experiment, through, happened, hint in (
        (resumed, None, "a run resumed after round 1", "keep state in client.memory, server.remember or entries"),
        (
            repeated,
            _answered_by_one_at_first(),
            "a run whose round 2 is repeated",
            "put a new value into server.memory instead of changing the old one in place",
        ),
        (
            both,
            _answered_by_one_at_first(),
            "a run resumed after round 1, whose round 2 is repeated,",
            "keep the server's state in server.remember",
        ),
    ):
        experiment.train(through=through)
        same = digest(whole.snapshot()) == digest(experiment.snapshot())
        _require(same, method, f"{happened} ends with other weights; {hint}.")


def _answered_by_one_at_first() -> Callable[[AskClients], AskClients]:
    """Lets only one client answer the first question to train of round 2, so that the round is repeated."""
    failed: list[Ask] = []

    def failing_once(ask_clients: AskClients) -> AskClients:
        def ask_them(ask: Ask) -> Iterator[Reply]:
            replies = ask_clients(ask)
            if ask.what == "train" and ask.round == 2 and not failed:
                failed.append(ask)
                replies = iter(list(replies)[:1])
            yield from replies

        return ask_them

    return failing_once


def _declares_itself(method: Method, model: Callable[[], nn.Module]) -> None:
    experiment = _experiment(method, model)
    seen = _watched(experiment)
    keeps = any(state.memory for state in experiment.backend.client_states.values()) or experiment.bench.plan.has_local_entries
    _require(method.facts.client_state or not keeps, method, "clients keep state, but facts.client_state is not declared.")
    extras = any(reply.extras for ask, replies in seen if ask.purpose == TRAINING for reply in replies)
    _require(
        bool(method.facts.data_derived_uploads) or not extras,
        method,
        "replies have extras derived from data, but facts.data_derived_uploads does not say what.",
    )
    _require(
        extras or not method.facts.data_derived_uploads or method.population is not None,
        method,
        "facts.data_derived_uploads says that something beyond model entries leaves a client, but no reply in training has any.",
    )
    _require(
        bool(method.facts.data_derived_uploads) == bool(method.facts.granularity),
        method,
        'facts.data_derived_uploads and facts.granularity belong together; granularity is "per sample" or "aggregate".',
    )


def _trains_as_declared(method: Method, model: Callable[[], nn.Module]) -> None:
    _either_works_or_says(
        method, lambda: _experiment(method, model, clients_per_round=0.6), must_work=not method.facts.full_participation
    )
    _either_works_or_says(method, lambda: _experiment(method, model, batch_size=1), must_work=method.facts.smallest_batch == 1)
    _either_works_or_says(
        method, lambda: _experiment(method, model, local_steps=3, weights="uniform", drop=0.3, min_share=0.0), must_work=True
    )


def _either_works_or_says(method: Method, make: Callable[[], Experiment], must_work: bool) -> None:
    try:
        experiment = make()
        experiment.train()
        experiment.evaluate()
    except PolyfedError as error:
        _require(not must_work, method, f"it should train as it declares, but: {error}")
