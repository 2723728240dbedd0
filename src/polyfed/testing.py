"""The contract every method keeps, as one function for our tests and for those of third parties.

    check_method("my_method(strength=0.3)")

It trains on a tiny made-up federation (three unequal clients, a model with batch norm) and takes less than a second.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.core.method import Method, as_method, methods, parse
from polyfed.core.part import Part, declared
from polyfed.core.replies import RequestContext, declared_extras
from polyfed.core.rounds import TRAINING, Reply, Request, SendRequest
from polyfed.core.server import Server
from polyfed.errors import PolyfedError, TooFewReplies
from polyfed.extras import problem_with_extras
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Snapshot, copied, digest
from polyfed.runs.replay import Replay, bad_replies, with_one_replaced
from polyfed.settings import Settings


class ContractBroken(PolyfedError, AssertionError):
    """A method breaks a promise that all methods make."""


SIZES = {"big": 13, "middle": 8, "small": 5}
FEW = {"big": 6, "middle": 4, "small": 3}


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
    with _random_streams_restored(), _without_warnings():
        _is_written_and_read(value)
        run = _WatchedRun(value, model)
        _sends_what_the_plan_says(run)
        run.evaluate()
        _stands_bad_replies(run)
        _repeats_to_the_bit(run)
        _resumes_to_the_bit(run)
        _declares_itself(run)
        _trains_as_declared(run)
    print(f"{value} passed check_method.")


def _require(fulfilled: bool, method: Method, broken: str) -> None:
    if not fulfilled:
        raise ContractBroken(f"{method}: {broken}")


def _is_written_and_read(method: Method) -> None:
    if not all(part.name in methods.names() for part in method.parts):
        return
    for text in (str(method), method.full_text):
        _require(str(parse(text)) == str(method), method, f"the text {text!r} reads back as {str(parse(text))!r}.")
    mirrored = " + ".join(reversed(str(method).split(" + "))) if "(" not in str(method) else str(method)
    _require(str(parse(mirrored)) == str(method), method, "the order in which it is written changes its text.")


@dataclass
class _BadReplies:
    """Bad replies of one client in the place of a good one, by what is wrong with them; those in ``pass_checks`` have the declared form."""

    client: str
    made: dict[str, Reply]
    pass_checks: dict[str, Reply] = field(default_factory=dict)


class _WatchedRun:
    """One run of two rounds and an evaluation: most promises are checked on it, others by runs that must end as it does."""

    def __init__(self, method: Method, model: Callable[[], nn.Module]) -> None:
        self.method, self.model = method, model
        self.replay = Replay(self.experiment())
        self.bad: dict[tuple[str, str], _BadReplies] = {}
        self.after_round: list[Snapshot] = []
        """After the setup, and after each round."""
        self.refused: TooFewReplies | None = None
        self.rejected: dict[str, str] = {}
        """Why replies were rejected, by client."""
        self.streams = _random_streams()
        try:
            self.replay.train(self._watch, [self._keep_snapshot])
        except TooFewReplies as error:
            self.refused = error

    def experiment(self, sizes: dict[str, int] | None = None, **changes: Any) -> Experiment:
        """The method on the tiny federation, always from the same initial weights."""
        values: dict[str, Any] = {"data": "tiny", "rounds": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            built = self.model()
        return Experiment(Settings(**values | changes), tiny_federation(sizes), self.method, built)

    def evaluate(self) -> None:
        """Score the trained state, as the last thing of the run."""
        self.trained = digest(self.after_round[-1])
        self.replay.evaluate(self.replay.record)
        self.evaluated = digest(self.replay.experiment.snapshot())
        self.draws = self.streams != _random_streams()

    def _keep_snapshot(self, server: Server) -> None:
        self.rejected |= server.rejected
        self.after_round.append(copied(self.replay.experiment.snapshot()))

    def _watch(self, request: Request) -> Iterator[Reply]:
        for reply in self.replay.record(request):
            for name in reply.extras:
                if (request.what, name) not in self.bad:
                    self.bad[request.what, name] = _BadReplies(reply.client, bad_replies(reply, name))
                self._try_forms(request, self.bad[request.what, name])
            yield reply

    def _try_forms(self, request: Request, bad: _BadReplies) -> None:
        """Note which bad replies the declared form lets through in this round; all others are refused before the method sees them."""
        asked = RequestContext(self.replay.experiment.server, request, bad.client)
        forms = declared_extras(self.method, request.what)
        for what, reply in bad.made.items():
            try:
                passes = not problem_with_extras(reply.extras, forms, asked)
            except Exception:
                passes = True  # its error stops the run, which is then told with what is wrong with the reply
            if passes:
                bad.pass_checks[what] = reply


def _sends_what_the_plan_says(run: _WatchedRun) -> None:
    method = run.method
    _check_declared(method, run.replay.seen)
    compressed = any(type(declared(change)).undo is not Part.undo for change in method.uploads)
    for ask, replies in run.replay.seen:
        if ask.purpose != TRAINING or ask.round == 0:
            continue
        phase = run.replay.experiment.bench.plan.at(ask.round)
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
    _require(run.refused is None, method, f"its replies are refused. {run.refused}")
    _accepts_all_replies(method, run.rejected)


def _accepts_all_replies(method: Method, rejected: Mapping[str, str]) -> None:
    for client, reason in rejected.items():
        hint = " If the method runs the model more than once per step, declare it: Facts(passes=2)." if "batches" in reason else ""
        _require(False, method, f"the server drops the reply of client {client}: {reason}.{hint}")


def _check_declared(method: Method, seen: list[tuple[Request, list[Reply]]]) -> None:
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


def _stands_bad_replies(run: _WatchedRun) -> None:
    """One client's bad extra is refused, or does no harm: the run goes on, and all that the server keeps is finite.

    Of the bad replies that are refused, only the one without the extra is sent: the method sees none of them.
    """
    for (question, name), bad in run.bad.items():
        for what, reply in {"missing": bad.made["missing"], **bad.pass_checks}.items():
            said = f"a reply to {question!r} in which {name!r} is {what}"
            try:
                run.replay.run(with_one_replaced(question, reply))
            except Exception as error:
                raise ContractBroken(
                    f"{run.method}: {said} stops the run ({type(error).__name__}: {error}). Declare its form more closely in reply_extras."
                ) from error
            _require(
                run.replay.is_finite(), run.method, f"{said} leaves values that are not finite. Declare bounds in reply_extras."
            )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warnings about replies that are withheld on purpose; a reply that should not have been dropped is an error."""
    log = logging.getLogger("polyfed")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


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


def _random_streams() -> tuple[object, ...]:
    """Where the caller's random streams are."""
    name, keys, *place = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(place), torch.get_rng_state().numpy().tobytes()


def _repeats_to_the_bit(run: _WatchedRun) -> None:
    """A second run, in which round 2 has to be repeated, and before which the user drew random numbers, ends as the first."""
    _require(not run.draws, run.method, "it draws from the user's own random numbers.")
    for _ in range(3):
        random.random()
        np.random.random()
        torch.rand(())
    again = Replay(run.experiment())
    again.train(_one_answers_at_first(again.record))
    if digest(again.experiment.snapshot()) != run.trained:
        plain = run.experiment()
        plain.train()
        _require(
            digest(plain.snapshot()) != run.trained,
            run.method,
            "a run whose round 2 is repeated ends with other weights; put a new value into server.memory instead of changing the old one in place.",
        )
    again.evaluate(again.record)
    _require(
        digest(again.experiment.snapshot()) == run.evaluated,
        run.method,
        "the same run twice gives different weights; draw only from client.generator or torch's default stream.",
    )


def _resumes_to_the_bit(run: _WatchedRun) -> None:
    def ends_as_the_run(through: Callable[[SendRequest], SendRequest] | None) -> bool:
        resumed = run.experiment()
        resumed.restore(copied(run.after_round[1]))
        resumed.train(through=through)
        return digest(resumed.snapshot()) == run.trained

    if ends_as_the_run(_one_answers_at_first):
        return
    _require(
        ends_as_the_run(None),
        run.method,
        "a run resumed after round 1 ends with other weights; keep state in client.memory, server.persistent or entries.",
    )
    raise ContractBroken(
        f"{run.method}: a run resumed after round 1, whose round 2 is repeated, ends with other weights; keep the server's state in server.persistent."
    )


def _one_answers_at_first(send_request: SendRequest) -> SendRequest:
    """Lets only one client answer the first question to train of round 2, so that the round is repeated."""
    failed: list[Request] = []

    def ask_them(request: Request) -> Iterator[Reply]:
        replies = send_request(request)
        if request.what == "train" and request.round == 2 and not failed:
            failed.append(request)
            replies = iter(list(replies)[:1])
        yield from replies

    return ask_them


def _declares_itself(run: _WatchedRun) -> None:
    method, facts = run.method, run.method.facts
    keeps = any(state.memory for state in run.after_round[-1].clients.values())
    keeps = keeps or run.replay.experiment.bench.plan.has_local_entries
    _require(facts.client_state or not keeps, method, "clients keep state, but facts.client_state is not declared.")
    extras = any(reply.extras for ask, replies in run.replay.seen if ask.purpose == TRAINING for reply in replies)
    _require(
        bool(facts.data_derived_uploads) or not extras,
        method,
        "replies have extras derived from data, but facts.data_derived_uploads does not say what.",
    )
    _require(
        extras or not facts.data_derived_uploads or method.population is not None,
        method,
        "facts.data_derived_uploads says that something beyond model entries leaves a client, but no reply in training has any.",
    )
    _require(
        bool(facts.data_derived_uploads) == bool(facts.granularity),
        method,
        'facts.data_derived_uploads and facts.granularity belong together; granularity is "per sample" or "aggregate".',
    )


def _trains_as_declared(run: _WatchedRun) -> None:
    facts = run.method.facts
    for must_work, changes in (
        (not facts.full_participation, {"clients_per_round": 0.6}),
        (facts.smallest_batch == 1, {"batch_size": 1}),
        (True, {"local_steps": 3, "weights": "uniform", "drop": 0.3, "min_share": 0.0}),
        (True, {"local_epochs": 4, "rounds": 1}),
    ):
        rejected: dict[str, str] = {}
        try:
            experiment = run.experiment(FEW, **changes)
            experiment.train([lambda server, into=rejected: into.update(server.rejected)])  # type: ignore[misc]
            experiment.evaluate()
        except PolyfedError as error:
            _accepts_all_replies(run.method, experiment.server.rejected)
            _require(not must_work, run.method, f"it should train as it declares, but: {error}")
        _accepts_all_replies(run.method, rejected)
