"""Check replies. Each check returns the problem as text, or an empty string.

``checked`` is the only place where replies are checked: before traffic is counted, before an exchange receives them, and before any of
their content is sent to other clients. ``Method.reply_extras`` and ``Method.reply_entries`` declare what a reply may contain.
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
    """Request to one client. The size of a reply may depend on it."""

    server: Server
    request: Request
    client: str

    @property
    def plan(self) -> Plan:
        """Sharing plan, with the shape and type of every entry."""
        return self.server.plan

    @property
    def info(self) -> ClientInfo:
        """Information about the client that is available to the server."""
        return self.server.client_info[self.client]

    @property
    def devices(self) -> frozenset[str]:
        """Devices that tensors of a reply may be on: the CPU and the model's device."""
        anchor = next(iter(self.server.blueprint.parameters()), None)
        return frozenset({"cpu"} if anchor is None else {"cpu", anchor.device.type})

    @property
    def steps(self) -> int:
        """Maximum number of steps that this client takes in a round."""
        settings = self.server.settings
        return settings.local_epochs * self.batches if settings.local_steps is None else settings.local_steps

    @property
    def fewest_steps(self) -> int:
        """Minimum number of steps: the last batch of each epoch may be dropped or merged."""
        settings = self.server.settings
        return settings.local_epochs * max(self.batches - 1, 1) if settings.local_steps is None else settings.local_steps

    @property
    def batches(self) -> int:
        """Number of batches in this client's data."""
        return math.ceil(self.info.samples / self.server.settings.batch_size)


@declare(trains=True)
def planned_uploads(context: RequestContext) -> Sequence[str]:
    """Return the names of the entries that clients upload after training, according to the plan."""
    return context.plan.at(context.request.round).up


def requested_entries(context: RequestContext) -> Sequence[str]:
    """Return the names of the entries that the request lists."""
    names: Sequence[str] = context.request.payloads[context.client].extras["names"]
    return names


def tested_domains(context: RequestContext) -> frozenset[str]:
    """Return the valid keys of a client's scores: its domains, its test domains and, for validation, all its domains joined."""
    info = context.info
    tests = (mark[0] for mark in info.test_set_ids if isinstance(mark, tuple))
    return frozenset({*info.domains, *map(str, tests), "+".join(info.domains)})


@dataclass(frozen=True)
class ScoreRecord:
    """Scores of one test set, in the format of the run's task."""

    required: bool = True

    def problem(self, value: Any, context: RequestContext) -> str:
        return context.server.task.problem_with_record(value)


REPLY_EXTRAS: Mapping[str, Mapping[str, Extra]] = {
    "train": {},
    "evaluate": {"scores": MappingOf(ScoreRecord(), tested_domains)},
    "entries": {"untrained": Flag()},
}
"""Extras in replies to the built-in requests. Methods add to those of training."""

REPLY_ENTRIES: Mapping[str, ReplyEntries] = {"train": planned_uploads, "entries": requested_entries}
"""Entries in replies to the built-in requests."""


NOT_NEGATIVE = {"exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0, "step": 1.0}
"""Minimum values of optimizer buffers, if they have one."""


def checked(send_request: SendRequest, server: Server) -> SendRequest:
    """Wrap ``send_request``: reject invalid replies and log the reason; yield only valid replies, decoded."""

    def check(request: Request) -> Replies:
        replied: set[str] = set()
        server.requested_clients = tuple(client for client in request.payloads if client in server.client_info)
        for reply in send_request(request):
            client = getattr(reply, "client", None)
            if (
                not isinstance(client, str)
                or client not in request.payloads
                or client not in server.client_info
                or client in replied
            ):
                # Do not reject the client: it may have sent a valid reply as well.
                server.drop_reply(shown(client), "it has already replied" if client in replied else "it was not requested")
                continue
            replied.add(client)
            entries, problem = checked_reply(server, request, reply)
            if problem:
                server.reject(client, problem)
            else:
                yield within_norm(server, request, replace(reply, decoded=entries))

    return check


def within_norm(server: Server, request: Request, reply: Reply) -> Reply:
    """Return a valid reply, with its update scaled down to ``max_update_norm`` if necessary."""
    largest, entries = server.settings.max_update_norm, reply.decoded
    if largest is None or not entries or not trains_before_reply(declared_entries(server.method, request.what)):
        return reply
    found, norm = bounded(entries, {**server.state, **request.payloads[reply.client].entries}, largest)
    if found is entries:
        return reply
    log.info("Round %d: scaled the update of client %s from norm %.4g to %g.", server.round, reply.client, norm, largest)
    # Custom rounds may read the uploaded entries. If these are encoded, only the decoded ones can be scaled.
    payload = Payload(found, reply.extras) if entries is reply.entries else reply.payload
    return replace(reply, payload=payload, decoded=found)


def checked_reply(server: Server, request: Request, reply: Reply) -> tuple[Mapping[str, Tensor], str]:
    """Return the decoded entries of a reply, and its problem (empty if it is valid)."""
    context, method = RequestContext(server, request, reply.client), server.method
    payload: Any = reply.payload
    if not isinstance(payload, Payload) or not isinstance(payload.entries, Mapping) or not isinstance(payload.extras, Mapping):
        return {}, f"it is {type(payload).__name__}, expected entries and extras"
    if type(reply.samples) is not int or reply.samples != context.info.samples:
        return {}, f"it counts {shown(reply.samples)} samples, expected {context.info.samples}"
    if problem := problem_with_extras(payload.extras, declared_extras(method, request.what), context):
        return {}, problem
    named = declared_entries(method, request.what)
    expected = () if named is None else named(context)
    return checked_entries(context, payload.entries, expected, encoded=trains_before_reply(named))


def declared_entries(method: Method, what: str) -> ReplyEntries | None:
    """Return the declaration of the entries in replies to a request; None if they contain none."""
    return {**REPLY_ENTRIES, **method.reply_entries}.get(what)


def trains_before_reply(named: ReplyEntries | None) -> bool:
    """Return True if clients train for such a reply: uploads are encoded, and all training hooks send extras."""
    return declared(named).trains


def declared_extras(method: Method, what: str) -> Mapping[str, Extra]:
    """Return the declarations of the extras in replies to a request."""
    trains = trains_before_reply(declared_entries(method, what))
    return {
        name: form
        for request in (("train", what) if trains else (what,))
        for known in (REPLY_EXTRAS, method.reply_extras)
        for name, form in known.get(request, {}).items()
    }


def checked_entries(
    context: RequestContext, entries: Mapping[Any, Any], expected: Sequence[str], encoded: bool
) -> tuple[Mapping[str, Tensor], str]:
    """Return the entries, decoded if the method encodes uploads, and their problem (empty if they are valid)."""
    allowed, known = frozenset(expected), context.plan.entries
    for name, value in entries.items():
        if not isinstance(name, str) or name not in allowed:
            return {}, f"{shown(name)} was not requested"
        if problem := problem_with_layout(value, context.devices):
            return {}, f"{name!r} {problem}"
    decoded = context.server.decode_uploads(entries) if encoded else entries
    return decoded, problem_with(decoded, expected, known, context.devices) or problem_with_counters(context, decoded)


def problem_with(
    entries: Mapping[str, Tensor], expected: Sequence[str], known: Mapping[str, Entry], devices: frozenset[str] = frozenset({"cpu"})
) -> str:
    """Return the reason why these entries cannot be aggregated; empty if they can."""
    required = [name for name in expected if known[name].of is None]
    missing = [name for name in required if name not in entries]
    if missing:
        return f"{len(missing)} entries are missing, {missing[0]!r} first"
    allowed = set(expected)
    for name, value in entries.items():
        if name not in allowed:
            return f"{name!r} was not requested"
        if problem := problem_with_tensor(value, known[name].shape, known[name].dtype, devices):
            return f"{name!r} {problem}"
    return next(
        (f"{name!r} {why}" for name, value in entries.items() if (why := problem_with_values(value, least(known[name])))), ""
    )


def least(entry: Entry) -> float:
    """Return the minimum value of an entry. Variances and second moments are not negative; step counters start at 1."""
    own = entry.name.removeprefix(OPTIMIZER).split("/", 1)[0] if entry.of is not None else entry.name.rpartition(".")[2]
    if entry.kind == STATISTIC and own == "running_var":
        return 0.0
    if entry.kind == MOMENTUM and own in NOT_NEGATIVE:
        return NOT_NEGATIVE[own]
    return -LARGEST


def problem_with_counters(context: RequestContext, entries: Mapping[str, Tensor]) -> str:
    """Return the problem with a counter: it exceeds the number of batches that the client can have seen.

    Counters must be bounded because the server keeps the largest one and sends it to all clients. A method that runs the model more
    than once per step declares it in ``Facts.passes``.
    """
    sent, state = context.request.payloads[context.client].entries, context.server.state
    for name, value in entries.items():
        if context.plan.entries[name].kind != COUNTER or value.numel() == 0:
            continue
        # A counter that was not sent is local and has increased in every round so far.
        rounds = 1 if name in sent else max(context.server.round, 1)
        base = sent.get(name, state.get(name, torch.zeros_like(value)))
        start, most, least = int(base.max()), int(value.max()), int(value.min())
        grown = rounds * (context.steps * context.server.method.facts.passes + context.batches)
        if least < 0 or most > start + grown:
            grown *= runs_per_pass(context.server, name)
        if least < 0 or most > start + grown:
            return f"{name!r} counts {most if least >= 0 else least} batches, expected 0 to {start + grown}"
    return ""


@torch.no_grad()
def runs_per_pass(server: Server, name: str) -> int:
    """Return how many times the module of an entry runs in one forward pass. A batch norm that runs twice counts two batches."""
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
