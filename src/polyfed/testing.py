"""``check_method``, a test of the contract of all methods, for built-in and third-party methods.

    check_method("my_method(strength=0.3)")

It trains on a tiny synthetic federation (three clients of different sizes, a model with batch norm) in less than a second.
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
from polyfed.errors import NotFinite, PolyfedError, TooFewReplies
from polyfed.extras import problem_with_extras
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import Snapshot, copied, digest
from polyfed.runs.replay import Replay, bad_replies, with_one_replaced
from polyfed.settings import Settings


class ContractBroken(PolyfedError, AssertionError):
    """A method violates the contract of all methods."""


SIZES = {"big": 13, "middle": 8, "small": 5}
FEW = {"big": 6, "middle": 4, "small": 3}


def tiny_federation(sizes: dict[str, int] | None = None, classes: int = 3) -> Federation:
    """Return a federation of random images, with clients of different sizes and appearance."""
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
        x = self.stem(x)
        x = torch.relu(x + self.branch(x))
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def check_method(method: str | Method, model: Callable[[], nn.Module] = TinyNet) -> None:
    """Check that a method fulfils the contract.

    Args:
        method: Method expression, or ``Method`` from a registered factory.
        model: Function that builds a model for the method.

    Raises:
        ContractBroken: If the method violates the contract. The message describes the problem.
    """
    value = as_method(method)
    with _random_streams_restored(), _without_warnings():
        _check_expression(value)
        run = _RecordedRun(value, model)
        _check_sharing_plan(run)
        run.evaluate()
        _check_bad_replies(run)
        _check_repeatable(run)
        _check_resumable(run)
        _check_facts(run)
        _check_training(run)
    print(f"{value} passed check_method.")


def _require(fulfilled: bool, method: Method, broken: str) -> None:
    if not fulfilled:
        raise ContractBroken(f"{method}: {broken}")


def _check_expression(method: Method) -> None:
    if not all(part.name in methods.names() for part in method.parts):
        return
    for text in (str(method), method.full_text):
        _require(str(parse(text)) == str(method), method, f"the expression {text!r} is parsed as {str(parse(text))!r}.")
    mirrored = " + ".join(reversed(str(method).split(" + "))) if "(" not in str(method) else str(method)
    _require(str(parse(mirrored)) == str(method), method, "the expression depends on the order of its parts.")


@dataclass
class _BadReplies:
    """Bad replies of one client, by their defect. Those in ``pass_checks`` match the declared form."""

    client: str
    made: dict[str, Reply]
    pass_checks: dict[str, Reply] = field(default_factory=dict)


class _RecordedRun:
    """A run of two rounds and an evaluation. Other runs are compared with it."""

    def __init__(self, method: Method, model: Callable[[], nn.Module]) -> None:
        self.method, self.model = method, model
        self.replay = Replay(self.experiment())
        self.bad: dict[tuple[str, str], _BadReplies] = {}
        self.snapshots: list[Snapshot] = []
        """Snapshots after the setup and after each round."""
        self.refused: NotFinite | TooFewReplies | None = None
        self.rejected: dict[str, str] = {}
        """Reason for each rejected reply, by client."""
        self.streams = _random_streams()
        try:
            self.replay.train(self._record, [self._keep_snapshot])
        except (NotFinite, TooFewReplies) as error:
            self.refused = error

    def experiment(self, sizes: dict[str, int] | None = None, **changes: Any) -> Experiment:
        """Build an experiment on the tiny federation, always with the same initial weights."""
        values: dict[str, Any] = {"data": "tiny", "rounds": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            built = self.model()
        return Experiment(Settings(**values | changes), tiny_federation(sizes), self.method, built)

    def evaluate(self) -> None:
        """Evaluate the trained state, at the end of the run."""
        self.trained = digest(self.snapshots[-1])
        self.replay.evaluate(self.replay.record)
        self.evaluated = digest(self.replay.experiment.snapshot())
        self.draws = self.streams != _random_streams()

    def _keep_snapshot(self, server: Server) -> None:
        self.rejected |= server.rejected
        self.snapshots.append(copied(self.replay.experiment.snapshot()))

    def _record(self, request: Request) -> Iterator[Reply]:
        for reply in self.replay.record(request):
            for name in reply.extras:
                if (request.what, name) not in self.bad:
                    self.bad[request.what, name] = _BadReplies(reply.client, bad_replies(reply, name))
                self._check_forms(request, self.bad[request.what, name])
            yield reply

    def _check_forms(self, request: Request, bad: _BadReplies) -> None:
        """Collect the bad replies that match the declared form. All others are rejected before the method receives them."""
        context = RequestContext(self.replay.experiment.server, request, bad.client)
        forms = declared_extras(self.method, request.what)
        for defect, reply in bad.made.items():
            try:
                passes = not problem_with_extras(reply.extras, forms, context)
            except Exception:
                passes = True  # the error will stop the run, which reports the defect
            if passes:
                bad.pass_checks[defect] = reply


def _check_sharing_plan(run: _RecordedRun) -> None:
    method = run.method
    _check_declared(method, run.replay.seen)
    compressed = any(type(declared(change)).undo is not Part.undo for change in method.uploads)
    for request, replies in run.replay.seen:
        if request.purpose != TRAINING or request.round == 0:
            continue
        phase = run.replay.experiment.bench.plan.at(request.round)
        local = {name for name, travel in phase.travels.items() if not travel.up and not travel.down}
        for client, payload in request.payloads.items():
            sent = sorted(local & set(payload.entries))
            _require(not sent, method, f"round {request.round} sends {sent[:1]} to {client}, which is local in the plan.")
            extra = sorted(set(payload.entries) - set(phase.down)) if request.what == "train" else []
            _require(not extra, method, f"round {request.round} sends {extra[:1]} to {client}, which the plan does not send down.")
        for reply in replies:
            sent = sorted(local & set(reply.entries))
            _require(not sent, method, f"client {reply.client} uploads {sent[:1]}, which is local in the plan.")
            if not compressed and request.what == "train":
                extra = sorted(set(reply.entries) - set(phase.up))
                _require(not extra, method, f"client {reply.client} uploads {extra[:1]}, which is not in the plan.")
    _require(run.refused is None, method, f"its replies are rejected. {run.refused}")
    _require_no_rejection(method, run.rejected)


def _require_no_rejection(method: Method, rejected: Mapping[str, str]) -> None:
    for client, reason in rejected.items():
        hint = " If the method runs the model more than once per step, declare it: Facts(passes=2)." if "batches" in reason else ""
        _require(False, method, f"the server drops the reply of client {client}: {reason}.{hint}")


def _check_declared(method: Method, seen: list[tuple[Request, list[Reply]]]) -> None:
    """Check that every extra in a reply is declared."""
    for request, replies in seen:
        declared = declared_extras(method, request.what)
        for reply in replies:
            extra = next((name for name in sorted(reply.extras) if name not in declared), None)
            _require(
                extra is None,
                method,
                f"client {reply.client} sends the extra {extra!r} in its reply to {request.what!r}, but reply_extras does not declare "
                f'it, so the reply is rejected. Declare it: Method(reply_extras={{"{request.what}": {{...: Number(...) or Array(...)}}}}).',
            )


def _check_bad_replies(run: _RecordedRun) -> None:
    """Check that a bad reply is rejected or harmless: the run continues, and the server state stays finite.

    The method never receives a rejected reply, so only one of them is tested: the reply without the extra.
    """
    for (request, name), bad in run.bad.items():
        for defect, reply in {"missing": bad.made["missing"], **bad.pass_checks}.items():
            case = f"a reply to {request!r} in which {name!r} is {defect}"
            try:
                run.replay.run(with_one_replaced(request, reply))
            except Exception as error:
                raise ContractBroken(
                    f"{run.method}: {case} stops the run ({type(error).__name__}: {error}). Declare a stricter form in reply_extras."
                ) from error
            _require(run.replay.is_finite(), run.method, f"{case} causes NaN or infinite values. Declare bounds in reply_extras.")


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
    """Restore the state of the global random generators (Python, NumPy, torch) afterwards."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)


def _random_streams() -> tuple[object, ...]:
    """Return the state of the global random generators."""
    name, keys, *place = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(place), torch.get_rng_state().numpy().tobytes()


def _check_repeatable(run: _RecordedRun) -> None:
    """Check that a second run has the same result, although round 2 is retried and the global random state differs."""
    _require(not run.draws, run.method, "it draws from the global random generators.")
    for _ in range(3):
        random.random()
        np.random.random()
        torch.rand(())
    again = Replay(run.experiment())
    again.train(_fail_round_2_once(again.record))
    if digest(again.experiment.snapshot()) != run.trained:
        plain = run.experiment()
        plain.train()
        _require(
            digest(plain.snapshot()) != run.trained,
            run.method,
            "a run in which round 2 is retried ends with different weights; assign new values in server.memory instead of modifying old ones.",
        )
    again.evaluate(again.record)
    _require(
        digest(again.experiment.snapshot()) == run.evaluated,
        run.method,
        "two identical runs end with different weights; draw only from client.generator or torch's default generator.",
    )


def _check_resumable(run: _RecordedRun) -> None:
    def has_same_result(through: Callable[[SendRequest], SendRequest] | None) -> bool:
        resumed = run.experiment()
        resumed.restore(copied(run.snapshots[1]))
        resumed.train(through=through)
        return digest(resumed.snapshot()) == run.trained

    if has_same_result(_fail_round_2_once):
        return
    _require(
        has_same_result(None),
        run.method,
        "a run resumed after round 1 ends with different weights; keep state in client.memory, server.persistent or entries.",
    )
    raise ContractBroken(
        f"{run.method}: a run resumed after round 1, in which round 2 is retried, ends with different weights; keep the server state in "
        "server.persistent."
    )


def _fail_round_2_once(send_request: SendRequest) -> SendRequest:
    """Return only one reply to the first training request of round 2, so that the round is retried."""
    failed: list[Request] = []

    def send(request: Request) -> Iterator[Reply]:
        replies = send_request(request)
        if request.what == "train" and request.round == 2 and not failed:
            failed.append(request)
            replies = iter(list(replies)[:1])
        yield from replies

    return send


def _check_facts(run: _RecordedRun) -> None:
    method, facts = run.method, run.method.facts
    keeps = any(state.memory for state in run.snapshots[-1].clients.values())
    keeps = keeps or run.replay.experiment.bench.plan.has_local_entries
    _require(facts.client_state or not keeps, method, "clients keep state, but facts.client_state is not declared.")
    extras = any(reply.extras for request, replies in run.replay.seen if request.purpose == TRAINING for reply in replies)
    _require(
        bool(facts.data_derived_uploads) or not extras,
        method,
        "replies contain extras derived from data, but facts.data_derived_uploads is not declared.",
    )
    _require(
        extras or not facts.data_derived_uploads or method.population is not None,
        method,
        "facts.data_derived_uploads declares uploads besides model entries, but no training reply contains any.",
    )
    _require(
        bool(facts.data_derived_uploads) == bool(facts.granularity),
        method,
        'facts.data_derived_uploads and facts.granularity require each other; granularity is "per sample" or "aggregate".',
    )


def _check_training(run: _RecordedRun) -> None:
    facts = run.method.facts
    for must_work, changes in (
        (not facts.full_participation, {"clients_per_round": 0.6}),
        (facts.smallest_batch == 1, {"batch_size": 1}),
        (True, {"local_steps": 3, "weights": "uniform", "drop": 0.3, "min_share": 0.0}),
        (True, {"local_epochs": 4, "rounds": 1}),
    ):
        rejected: dict[str, str] = {}
        experiment: Experiment | None = None
        try:
            experiment = run.experiment(FEW, **changes)
            experiment.train([lambda server, into=rejected: into.update(server.rejected)])  # type: ignore[misc]
            experiment.evaluate()
        except PolyfedError as error:
            if experiment is not None:
                _require_no_rejection(run.method, experiment.server.rejected)
            _require(not must_work, run.method, f"training fails although the facts allow it: {error}")
        _require_no_rejection(run.method, rejected)
