"""List everything that leaves a client, and whether the method's differential privacy guarantee covers it; report the privacy ledger.

A method that adds noise declares it in its facts: ``protects`` (samples or clients), ``noise_at``, ``noise_from``. Everything that leaves a
client is checked against the declarations of its parts. Code in a slot counts as reading the data unless it declares
``reads_data = False``. Such code uses only weights, gradients and values from the server, so its results are as private as its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from polyfed.core.entries import COUNTER, MOMENTUM, STATISTIC
from polyfed.core.part import declared

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.server import Server
    from polyfed.core.sharing import Plan
    from polyfed.settings import Settings

TRAINING_SLOTS = ("receiving", "inputs", "gradients", "uploads", "before_training", "after_training", "objective", "task_loss")
"""Slots whose code runs at a client during training, between the data and the uploads."""

ACCOUNTS = "privacy"
"""Key of the clients' privacy ledgers in the server's memory, and name of the extra that reports them."""

CLASS_COUNTS, TRAINING_LOSS, VALIDATION_SCORES = "numbers of samples by class", "training loss", "validation scores"
"""Values that any run may send without noise, and that a node may withhold."""

TEST_SCORES, KEPT_LAYERS = "test scores", "layers that stay at clients"


@dataclass(frozen=True)
class Departure:
    """One thing that leaves a client.

    Attributes:
        what: Name.
        part: Part of the method that sends it. Empty if every run sends it.
        when: How often it is sent.
        granularity: Derived from single samples (``per sample``), from many (``aggregate``), or from ``none``.
        covered: True if the privacy guarantee covers it.
        why: Reason.
    """

    what: str
    part: str
    when: str
    granularity: str
    covered: bool
    why: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Charge:
    """Privacy cost of one training of a client: steps of a Gaussian mechanism on Poisson samples.

    Attributes:
        protects: Unit of the guarantee: samples, or the whole client.
        noise_multiplier: Standard deviation of the noise divided by the clipping norm.
        sample_rate: Probability that a sample is part of a step.
        steps: Number of steps.
    """

    protects: str
    noise_multiplier: float
    sample_rate: float
    steps: int


def looking_at_data(method: Method) -> Iterator[tuple[str, str]]:
    """Yield part and slot of all code that may read the data during training."""
    for part in method.parts:
        for slot in TRAINING_SLOTS:
            if any(declared(hook).reads_data for hook in part.items(slot)):
                yield part.name, slot


def departures(method: Method, settings: Settings, plan: Plan | None = None) -> list[Departure]:
    """List everything that leaves a client. With a plan, model entries are listed by entry kind."""
    kept = [_kept_layers(method)] if plan is not None and plan.local_names else []
    return [*_entries(method, plan), *kept, *_extras(method), *_answers(method), *_pooled(method), *_of_every_run(method, settings)]


def answered(method: Method, question: str, extras: Mapping[str, Any]) -> Departure | None:
    """Describe what leaves a client with the reply to a request; None if no part declares such a reply.

    Args:
        method: Method of the run.
        question: Name of the request.
        extras: Extras of the request.
    """
    own = {row.what: row for row in _answers(method)}
    if question in method.answers:
        return own[f"answer: {question}"]
    if question == "train":
        return next(_entries(method, None))
    if question == "entries":
        return _kept_layers(method)
    if question == "evaluate":
        split = str(extras.get("split", "test"))
        return _test_scores(method) if split == "test" else _SCORES.get(split)
    return None


def uncovered(method: Method, settings: Settings, plan: Plan | None = None) -> list[Departure]:
    """List what parts of the method send without being covered by the privacy guarantee."""
    return [row for row in departures(method, settings, plan) if not row.covered and row.part]


def _trained(method: Method) -> tuple[bool, str]:
    """Return whether trained values are covered, and the reason."""
    facts = method.facts
    if not facts.protects:
        return False, "no noise is added"
    readers = [f"{part} ({slot.replace('_', ' ')})" for part, slot in looking_at_data(method)]
    if facts.protects == "samples" and readers:
        return False, f"{readers[0]} reads the data and adds no noise"
    if facts.noise_at == "server":
        return True, "clipped at the client; the server adds noise to the sum, so it sees values without noise"
    return (
        True,
        "gradients are clipped per sample, with noise" if facts.protects == "samples" else "the update is clipped, with noise",
    )


def _entries(method: Method, plan: Plan | None) -> Iterator[Departure]:
    covered, why = _trained(method)
    part = str(method)
    if plan is None:
        yield Departure("model entries", part, "every round", "aggregate", covered, why)
        return
    uploaded = dict.fromkeys(name for phase in plan.phases.values() for name in phase.up)
    for kind in dict.fromkeys(plan.entries[name].kind for name in uploaded):
        if kind == COUNTER:
            counts = (
                "counts batches, independently of their content"
                if method.facts.protects == "samples"
                else "reveals the number of batches of a client"
            )
            yield Departure(f"entries: {kind}", part, "every round", "none", method.facts.protects == "samples", counts)
        elif kind == STATISTIC and method.facts.protects == "samples":
            yield Departure(f"entries: {kind}", part, "every round", "aggregate", False, "measured on batches, without noise")
        else:
            yield Departure(f"entries: {kind}", part, "every round", "aggregate", covered, why)


def _kept_layers(method: Method) -> Departure:
    covered, why = _trained(method)
    if method.facts.protects == "clients":
        covered, why = False, "not part of the clipped update"
    return Departure(KEPT_LAYERS, str(method), "once, for a newcomer's model", "aggregate", covered, why)


def _extras(method: Method) -> Iterator[Departure]:
    covered, why = _trained(method)
    for part in method.parts:
        hooks = (*part.before_training, *part.after_training)
        free = bool(hooks) and not any(declared(hook).reads_data for hook in hooks)
        granularity = part.facts.granularity or ("none" if free else "aggregate")
        for name in part.reply_extras.get("train", {}):
            if part.facts.protects and name != ACCOUNTS:
                yield Departure(f"extra: {name}", part.name, "every round", granularity, covered, "sent with noise")
            elif part.facts.protects:
                yield Departure(f"extra: {name}", part.name, "every round", "none", True, "computed from settings, not from data")
            elif free and method.facts.protects != "clients":
                reason = "computed from trained values only" if covered else why
                yield Departure(f"extra: {name}", part.name, "every round", granularity, covered, reason)
            else:
                reason = (
                    "computed from data, without noise" if method.facts.protects != "clients" else "not part of the clipped update"
                )
                yield Departure(f"extra: {name}", part.name, "every round", granularity, False, reason)


def _answers(method: Method) -> Iterator[Departure]:
    for part in method.parts:
        for question, answer in part.answers.items():
            granularity = part.facts.granularity or "aggregate"
            if declared(answer).reads_data:
                yield Departure(
                    f"answer: {question}", part.name, "on request", granularity, False, "computed from data, without noise"
                )
            else:
                yield Departure(f"answer: {question}", part.name, "on request", "none", True, "computed without the data")


def _pooled(method: Method) -> Iterator[Departure]:
    for part in method.parts:
        if part.population is not None and part.facts.data_derived_uploads:
            what, how = part.facts.data_derived_uploads, part.facts.granularity
            yield Departure(what, part.name, "once", how, False, "the data itself")


TEST_DATA_ONLY = Departure(TEST_SCORES, "", "every evaluation", "aggregate", False, "of test data, which is not used in training")
"""Scores that reveal no training data beyond values that the server sent, or that noise covers."""

_SCORES = {
    "test": TEST_DATA_ONLY,
    "validation": Departure(VALIDATION_SCORES, "", "every round", "aggregate", False, "of validation data, without noise"),
}
"""Scores by split."""


def _test_scores(method: Method) -> Departure:
    """Describe test scores. Those of local layers reveal training data if noise is added only to uploads."""
    if method.facts.protects == "clients" and keeps_layers(method):
        return replace(TEST_DATA_ONLY, why="of a model with layers that stay at clients and get no noise")
    return TEST_DATA_ONLY


def keeps_layers(method: Method) -> bool:
    """Return True if a sharing rule keeps model entries at the clients."""
    return any(rule.keep and rule.down is False and rule.select.kinds != {MOMENTUM} for rule in method.sharing)


def _of_every_run(method: Method, settings: Settings) -> Iterator[Departure]:
    yield Departure("number of training samples", "", "once", "aggregate", False, "a count, without noise")
    yield Departure(CLASS_COUNTS, "", "once", "aggregate", False, "counts, without noise")
    if not method.facts.withholds_loss:
        yield Departure(TRAINING_LOSS, "", "every round", "aggregate", False, "a mean over samples, without noise")
    if settings.needs_validation:
        yield _SCORES["validation"]
    yield _test_scores(method)


def account_keys(method: Method) -> set[str]:
    """Return the keys of the clients' privacy ledgers in their memory."""
    return {declared(hook).account_key for hook in method.after_training} - {""}


def account_of(server: Server) -> dict[str, Any] | None:
    """Return the privacy ledger of the run, by client and in total; None if the method has no privacy guarantee.

    A sample belongs to one client, so the total is the maximum over clients.
    """
    facts = server.method.facts
    clients: Mapping[str, Mapping[str, Any]] = server.memory_state().get(ACCOUNTS, {})
    if not facts.protects:
        return None
    return {
        "protects": facts.protects,
        "noise_at": facts.noise_at,
        "noise_from": facts.noise_from,
        "epsilon_spent": max((float(each["epsilon_spent"]) for each in clients.values()), default=0.0),
        "epsilon": max((float(each["epsilon"]) for each in clients.values()), default=None),
        "delta": max((float(each["delta"]) for each in clients.values()), default=None),
        "clients": {name: dict(each) for name, each in sorted(clients.items())},
    }
