"""Why a reply cannot be used. Each check gives a sentence, or nothing.

``checked`` is the one place where replies are checked: before traffic is counted, before a exchange sees them, and before anything of
them is passed on to other clients. What an answer may hold is declared: ``Method.reply_extras`` and ``Method.reply_entries``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyfed.core.entries import COUNTER, MOMENTUM, OPTIMIZER, STATISTIC
from polyfed.core.part import declare, declared
from polyfed.core.reducers import bounded
from polyfed.core.rounds import Payload, Replies, Reply, Request, SendRequest
from polyfed.extras import (
    LARGEST,
    Extra,
    Flag,
    MappingOf,
    problem_with_extras,
    problem_with_layout,
    problem_with_tensor,
    problem_with_values,
    shown,
)

if TYPE_CHECKING:
    from polyfed.core.entries import Entry
    from polyfed.core.method import Method
    from polyfed.core.server import ClientInfo, Server
    from polyfed.core.sharing import Plan
    from polyfed.core.slots import ReplyEntries


log = logging.getLogger("polyfed")


@dataclass(frozen=True)
class RequestContext:
    """Who was asked what, by which server: what the size of an answer may depend on."""

    server: Server
    request: Request
    client: str

    @property
    def plan(self) -> Plan:
        """What travels, with the shape and type of every entry."""
        return self.server.plan

    @property
    def info(self) -> ClientInfo:
        """What the server knows of the client."""
        return self.server.client_info[self.client]

    @property
    def devices(self) -> frozenset[str]:
        """Where tensors of a reply may be: on the CPU, or where the model is."""
        anchor = next(iter(self.server.blueprint.parameters()), None)
        return frozenset({"cpu"} if anchor is None else {"cpu", anchor.device.type})

    @property
    def steps(self) -> int:
        """The most steps this client makes in a round."""
        settings = self.server.settings
        return settings.local_epochs * self.batches if settings.local_steps is None else settings.local_steps

    @property
    def fewest_steps(self) -> int:
        """The fewest steps it makes: a last batch of each epoch may be dropped or merged."""
        settings = self.server.settings
        return settings.local_epochs * max(self.batches - 1, 1) if settings.local_steps is None else settings.local_steps

    @property
    def batches(self) -> int:
        """Batches of this client's data."""
        return math.ceil(self.info.samples / self.server.settings.batch_size)


@declare(trains=True)
def planned_uploads(context: RequestContext) -> Sequence[str]:
    """What the plan says that clients upload after training."""
    return context.plan.at(context.request.round).up


def named_in_the_question(context: RequestContext) -> Sequence[str]:
    """The entries that the question names."""
    names: Sequence[str] = context.request.payloads[context.client].extras["names"]
    return names


def tested_domains(context: RequestContext) -> frozenset[str]:
    """What a client's scores may be of: its domains, those of its tests, and, for validation, all of them together."""
    info = context.info
    tests = (mark[0] for mark in info.test_set_ids if isinstance(mark, tuple))
    return frozenset({*info.domains, *map(str, tests), "+".join(info.domains)})


@dataclass(frozen=True)
class ScoreRecord:
    """The scores of one test set, in the form that the run's task gives them."""

    required: bool = True

    def problem(self, value: Any, context: RequestContext) -> str:
        return context.server.task.problem_with_record(value)


REPLY_EXTRAS: Mapping[str, Mapping[str, Extra]] = {
    "train": {},
    "evaluate": {"scores": MappingOf(ScoreRecord(), tested_domains)},
    "entries": {"untrained": Flag()},
}
"""The extras in answers to the questions that every client knows; methods add to those of training."""

REPLY_ENTRIES: Mapping[str, ReplyEntries] = {"train": planned_uploads, "entries": named_in_the_question}
"""The entries in answers to the questions that every client knows."""


NOT_NEGATIVE = {"exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0, "step": 1.0}
"""The least values of optimizer buffers that have one."""


def checked(send_request: SendRequest, server: Server) -> SendRequest:
    """A backend whose replies are checked: bad ones are rejected with who and why, and only good ones are passed on, decoded."""

    def check(request: Request) -> Replies:
        answered: set[str] = set()
        server.requested_clients = tuple(client for client in request.payloads if client in server.client_info)
        for reply in send_request(request):
            who = getattr(reply, "client", None)
            if not isinstance(who, str) or who not in request.payloads or who not in server.client_info or who in answered:
                # Not by ``reject``: it would hold a bad reply against a client that may have sent a good one.
                server.drop_reply(shown(who), "it has answered already" if who in answered else "it was not asked")
                continue
            answered.add(who)
            entries, problem = checked_reply(server, request, reply)
            if problem:
                server.reject(who, problem)
            else:
                yield within_norm(server, request, replace(reply, decoded=entries))

    return check


def within_norm(server: Server, request: Request, reply: Reply) -> Reply:
    """A good reply, moved no further from what the client was sent than the settings allow."""
    largest, entries = server.settings.max_update_norm, reply.decoded
    if largest is None or not entries or not answered_by_training(declared_entries(server.method, request.what)):
        return reply
    found, norm = bounded(entries, {**server.state, **request.payloads[reply.client].entries}, largest)
    if found is entries:
        return reply
    log.info("Round %d: the update of client %s has the norm %.4g and is scaled to %g.", server.round, reply.client, norm, largest)
    # Rounds of their own may read the entries that came up; where these are encoded, only the decoded ones can be scaled.
    payload = Payload(found, reply.extras) if entries is reply.entries else reply.payload
    return replace(reply, payload=payload, decoded=found)


def checked_reply(server: Server, request: Request, reply: Reply) -> tuple[Mapping[str, Tensor], str]:
    """The decoded entries of a reply, and why it cannot be used; empty where it can."""
    asked, method = RequestContext(server, request, reply.client), server.method
    payload: Any = reply.payload
    if not isinstance(payload, Payload) or not isinstance(payload.entries, Mapping) or not isinstance(payload.extras, Mapping):
        return {}, f"it is {type(payload).__name__}, expected entries and extras"
    if type(reply.samples) is not int or reply.samples != asked.info.samples:
        return {}, f"it counts {shown(reply.samples)} samples, expected {asked.info.samples}"
    if problem := problem_with_extras(payload.extras, declared_extras(method, request.what), asked):
        return {}, problem
    named = declared_entries(method, request.what)
    expected = () if named is None else named(asked)
    return checked_entries(asked, payload.entries, expected, encoded=answered_by_training(named))


def declared_entries(method: Method, question: str) -> ReplyEntries | None:
    """What names the entries in the answers to a question; None where they hold none."""
    return {**REPLY_ENTRIES, **method.reply_entries}.get(question)


def answered_by_training(named: ReplyEntries | None) -> bool:
    """Whether clients answer such a question by training: their uploads are encoded, and all hooks of training send extras."""
    return declared(named).trains


def declared_extras(method: Method, question: str) -> Mapping[str, Extra]:
    """The forms of the extras in the answers to a question."""
    trains = answered_by_training(declared_entries(method, question))
    questions = ("train", question) if trains else (question,)
    return {
        name: form
        for what in questions
        for known in (REPLY_EXTRAS, method.reply_extras)
        for name, form in known.get(what, {}).items()
    }


def checked_entries(
    context: RequestContext, entries: Mapping[Any, Any], expected: Sequence[str], encoded: bool
) -> tuple[Mapping[str, Tensor], str]:
    """The entries, decoded where the method encodes uploads, and why they cannot be used."""
    allowed, known = frozenset(expected), context.plan.entries
    for name, value in entries.items():
        if not isinstance(name, str) or name not in allowed:
            return {}, f"{shown(name)} was not asked for"
        if problem := problem_with_layout(value, context.devices):
            return {}, f"{name!r} {problem}"
    decoded = context.server.decode_uploads(entries) if encoded else entries
    return decoded, problem_with(decoded, expected, known, context.devices) or problem_with_counters(context, decoded)


def problem_with(
    entries: Mapping[str, Tensor], expected: Sequence[str], known: Mapping[str, Entry], devices: frozenset[str] = frozenset({"cpu"})
) -> str:
    """Why these entries cannot be absorbed; empty when they can."""
    required = [name for name in expected if known[name].of is None]
    missing = [name for name in required if name not in entries]
    if missing:
        return f"{len(missing)} entries are missing, {missing[0]!r} first"
    allowed = set(expected)
    for name, value in entries.items():
        if name not in allowed:
            return f"{name!r} was not asked for"
        if problem := problem_with_tensor(value, known[name].shape, known[name].dtype, devices):
            return f"{name!r} {problem}"
    return next(
        (f"{name!r} {why}" for name, value in entries.items() if (why := problem_with_values(value, least(known[name])))), ""
    )


def least(entry: Entry) -> float:
    """The least value an entry may have. Variances, and what Adam and its like take the root of, are not negative; steps begin at 1."""
    own = entry.name.removeprefix(OPTIMIZER).split("/", 1)[0] if entry.of is not None else entry.name.rpartition(".")[2]
    if entry.kind == STATISTIC and own == "running_var":
        return 0.0
    if entry.kind == MOMENTUM and own in NOT_NEGATIVE:
        return NOT_NEGATIVE[own]
    return -LARGEST


def problem_with_counters(context: RequestContext, entries: Mapping[str, Tensor]) -> str:
    """Why a counter cannot be: it counts more batches than the client has seen. The largest counter becomes everybody's."""
    sent, state = context.request.payloads[context.client].entries, context.server.state
    for name, value in entries.items():
        if context.plan.entries[name].kind != COUNTER or value.numel() == 0:
            continue
        # A counter that the client was not sent is its own, and has grown in every round so far.
        rounds = 1 if name in sent else max(context.server.round, 1)
        base = sent.get(name, state.get(name, torch.zeros_like(value)))
        start, most, least = int(base.max()), int(value.max()), int(value.min())
        grown = rounds * (context.steps + context.batches)
        if least < 0 or most > start + grown:
            grown *= uses_in_a_pass(context.server, name)
        if least < 0 or most > start + grown:
            return f"{name!r} counts {most if least >= 0 else least} batches, expected 0 to {start + grown}"
    return ""


@torch.no_grad()
def uses_in_a_pass(server: Server, name: str) -> int:
    """How often the module that owns an entry runs in one pass of the model; a batch norm that is used twice counts two batches."""
    model, calls = server.blueprint, 0
    if not server.input_shape:
        return 1

    def note(*_: object) -> None:
        nonlocal calls
        calls += 1

    modes = {module: module.training for module in model.modules()}
    anchor = next(model.parameters())
    hook = model.get_submodule(name.rpartition(".")[0]).register_forward_hook(note)
    try:
        nn.Module.eval(model)(torch.zeros(2, *server.input_shape, dtype=server.input_dtype, device=anchor.device))
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training
    return max(calls, 1)
