"""The node: loads its data, builds a workbench from the run's settings, stores client state and handles requests."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.client import Client, answer, local_validation
from polyfed.core.data_types import ClientData, Examples, Federation
from polyfed.core.method import Method, as_method, load_file
from polyfed.core.privacy import Charge
from polyfed.core.rounds import TRAINING, Payload
from polyfed.core.server import ClientInfo, canonical_order
from polyfed.core.workbench import ClientState, Workbench
from polyfed.data.federation_summary import RecordedInputs, input_type
from polyfed.data.partitions.partition import federate
from polyfed.data.store.domain_files import without_names
from polyfed.errors import ClientFailure, DataError, Declined, NotFinite, PolyfedError, SettingError, StateLost, nearest
from polyfed.extras import problem_with_values
from polyfed.flower.app import read_settings, settings_text
from polyfed.flower.deploy.private_files import home_of
from polyfed.flower.node.account import EPSILON_KEY, MIN_SAMPLES_KEY, NodeAccount, account_of, counts, uncounted
from polyfed.flower.wire.codec import Encoder, extras_of, payload_of
from polyfed.flower.wire.descriptions import own_versions, plain_text, version_problem
from polyfed.flower.wire.message import DECLINED, DESCRIBE, BadMessage, WireMessage, refusal
from polyfed.runs.assemble import build_bench, build_data_set, build_federation, normalised_for, prepared_model
from polyfed.runs.experiment import read_initial, threads
from polyfed.runs.folder.client_state_files import ClientStateFiles
from polyfed.runs.training_settings import with_one_model
from polyfed.settings import Settings, with_changes
from polyfed.tasks.losses import task_loss
from polyfed.tasks.task import Task

log = logging.getLogger("polyfed")

PARTITION = "partition-id"
LOST_STATE = "lost-state"
REFUSE, RESTART = "refuse", "restart"  # values of LOST_STATE: reject the request if the state is lost, or start over


class Workplace:
    """Method, data and workbench on this machine. The virtual clients of a process share one."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        for file in settings.load:
            load_file(file, settings.trust)
        self.settings = settings
        self.method: Method = as_method(settings.method)
        self.simulated = PARTITION in config
        if self.simulated:
            whole = build_federation(settings.data, settings)
            self.federation = whole if self.method.population is None else self.method.population(whole)
        else:
            self.federation = _local_federation(settings, config)
        self.initial = None if settings.init is None else read_initial(settings.init)
        self.facts = ""
        self.built: Workbench | None = None

    def bench(self, facts: Mapping[str, Any]) -> Workbench:
        """Return the workbench for these facts about the federation, such as the number of rounds and the class counts."""
        text = json.dumps(facts, sort_keys=True)
        if self.built is None or text != self.facts:
            settings = dataclasses.replace(self.settings, rounds=int(facts["rounds"]), total_epochs=None)
            settings = with_one_model(settings, self.federation.default_model, [self.method])
            with threads(settings.threads):
                model = prepared_model(settings, self.method, self.federation, None, self.initial)
                federation = _with_normalisation(normalised_for(model, self.federation), facts)
                self.built = build_bench(settings, self.method, federation, model)
            self.built.loss = task_loss(settings.loss, self.federation.task, list(facts["class_counts"]))
            self.built.measure = measure_in(facts, self.federation.task)
            self.facts = text
        return self.built


class Node:
    """One client and its workplace."""

    def __init__(
        self,
        workplace: Workplace,
        data: ClientData,
        home: Path,
        when_lost: str = REFUSE,
        account: NodeAccount | None = None,
        min_samples: int = 1,
    ) -> None:
        self.workplace, self.data, self.home, self.when_lost = workplace, data, home, when_lost
        self.account, self.min_samples = account, min_samples

    def answer(self, wire_message: WireMessage) -> WireMessage:
        """Return the reply to a request; errors become a refusal."""
        try:
            self.require_samples()
            if wire_message.control.get("what") == DESCRIBE:
                if problem := version_problem(wire_message.control.get("versions") or {}):
                    return refusal(f"The server cannot work with this node: {problem}.")
                return WireMessage({"ok": True, "description": self.description()})
            return self.work(wire_message)
        except NotFinite as error:
            return refusal(error.reason, "not_finite")
        except Declined as error:
            log.warning("%s", error)
            return refusal(str(error), DECLINED)
        except PolyfedError as error:
            log.warning("%s", error)
            return refusal(str(error))
        except BadMessage as error:
            return refusal(f"Client {self.data.id} cannot read the request: {error}.")

    def work(self, wire_message: WireMessage) -> WireMessage:
        """Load the client state that the request names, compute the reply, and store the new state."""
        request = wire_message.control
        if request["client"] != self.data.id:
            raise SettingError(f"This node is client {self.data.id}, but the request is for client {request['client']}.")
        files = ClientStateFiles(self.home, request["run"], self.data.id)
        state, restarted = self.starting_point(files, request["start"], request["purpose"])
        self.require_countable(str(request["what"]), extras_of(wire_message))
        bench = self.workplace.bench(request["facts"])
        charges: list[Charge] = []
        client = Client(
            self.data,
            bench,
            state,
            int(request["round"]),
            int(request["attempt"]),
            self.spending(bench.method, request["run"], int(request["round"]), charges),
        )
        with threads(bench.settings.threads):
            payload = answer(client, request["what"], _require_finite(payload_of(wire_message)))
            self.require_charge(client, charges)
            validation = local_validation(client) if request["what"] == "train" else None
        control: dict[str, Any] = {"ok": True, "loss": client.loss, "version": None, "restarted": restarted}
        if validation is not None:
            control["validation"] = validation
        if request["purpose"] == TRAINING and (client.state.entries or client.state.memory or request["start"] is not None):
            control |= {"version": request["version"], "digest": files.store(request["version"], client.state)}
            files.tidy(request["needed"], request["version"])
        return Encoder().encode(payload, control)

    def require_samples(self) -> None:
        """Decline if the partition, which the server chooses, assigns so few examples that uploads would reveal single ones."""
        if (found := len(self.data.train)) < self.min_samples:
            raise Declined(
                f"Client {self.data.id} does not take part: the partition {plain_text(self.workplace.settings.partition)} gives it {found} "
                f"training examples, but min_samples is {self.min_samples}. Use a partition that gives it more, such as domain."
            )

    def require_countable(self, question: str, extras: Mapping[str, Any]) -> None:
        """If the node limits epsilon over all runs, decline a method whose cost it cannot count."""
        method, limited = self.workplace.method, self.account is not None and self.account.max_epsilon > 0
        if limited and (problem := uncounted(method, self.workplace.settings, question, extras)):
            raise Declined(
                f"Client {self.data.id} does not take part: its privacy ledger limits epsilon over all runs ({EPSILON_KEY}), and {problem}. "
                'Use a method whose clients add noise to everything they send, such as dp_sgd(noise="system") or '
                'dp_fedavg(noise="system", noise_at="client").'
            )

    def spending(self, method: Method, run: str, round_number: int, charges: list[Charge]) -> Callable[[Charge], None] | None:
        """Return a function that writes charges to the ledger, or None if there is no ledger or no guarantee against the server."""
        account = self.account
        if account is None or not counts(method.facts):
            return None

        def spend(charge: Charge) -> None:
            account.spend(charge, self.data.id, run, round_number)
            charges.append(charge)

        return spend

    def require_charge(self, client: Client, charges: Sequence[Charge]) -> None:
        """Raise an error if a method with a privacy guarantee trained without reporting its cost."""
        if client.own_account is not None and client.optimizer is not None and not charges:
            raise ClientFailure(
                f"{client.bench.method} guarantees privacy, but trained without reporting its cost. "
                "Its code must call client.spend before it trains."
            )

    def starting_point(self, files: ClientStateFiles, start: Mapping[str, str] | None, purpose: str) -> tuple[ClientState, bool]:
        """Return the client state to start from, and True if it was lost and the client starts over."""
        if start is None:
            return ClientState(), False
        try:
            return files.load(start["version"], start["digest"]), False
        except StateLost as error:
            if self.when_lost == RESTART and purpose == TRAINING:
                log.warning("%s It starts over.", error)
                return ClientState(), True
            advice = f"To let it start over, start its node with --node-config '{LOST_STATE}=\"{RESTART}\"'."
            raise StateLost(f"{error} {advice}") from error

    def description(self) -> dict[str, Any]:
        """Return the description for the server: names and numbers, no examples."""
        federation, data = self.workplace.federation, self.data
        raw, _ = data.train.batch(slice(0, 1))
        return {
            "versions": own_versions(),
            "client": data.id,
            "domains": list(data.domains),
            "name": federation.name,
            "source": without_names(federation.source),
            "default_model": federation.default_model,
            "task": federation.task.name,
            "classes": list(federation.classes),
            "class_counts": federation.task.class_counts(data.train, len(federation.classes)),
            "samples": len(data.train),
            "input_shape": list(raw.shape[1:]),
            "input_type": input_type(raw),
            "mean": list(federation.preparation.mean),
            "std": list(federation.preparation.std),
            "middle_square": federation.preparation.middle_square,
            "deep_ranges": {
                domain: found for domain, found in federation.preparation.deep_ranges.items() if domain in data.domains
            },
            "tests": {domain: len(examples) for domain, examples in data.tests.items()},
            "validation": None if data.validation is None else len(data.validation),
        }


def _require_finite(payload: Payload) -> Payload:
    """Return the payload if its entries are finite; NaN could disable the clip of a private method, which compares numbers."""
    for name, value in payload.entries.items():
        if problem := problem_with_values(value):
            raise BadMessage(f"entry {plain_text(name)} {problem}")
    return payload


def measure_in(facts: Mapping[str, Any], task: Task) -> str:
    """Return the metric by which the run selects its round; default: the primary metric of the task."""
    measure = facts.get("measure", task.main_measure)
    if measure not in task.measures:
        raise BadMessage(f"the server selects rounds by {plain_text(str(measure))[:100]}, which is not a metric of {task.name}")
    return str(measure)


def _with_normalisation(federation: Federation, facts: Mapping[str, Any]) -> Federation:
    """Normalise images with the server's values; a resumed run keeps those in its folder."""
    if "mean" not in facts:
        return federation
    own = RecordedInputs.of(federation)
    try:
        mean, std = (tuple(map(float, facts[name])) for name in ("mean", "std"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadMessage("the server's normalisation values are not numbers") from error
    fits = len(mean) == len(std) and len(mean) in (1, own.shape[0], len(own.mean))
    if not fits or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise BadMessage(f"the server normalises images of {own.shape[0]} channels with mean {mean} and standard deviation {std}")
    return dataclasses.replace(own, mean=mean, std=std).put_into(federation)


def counts_of(examples: Examples, task: Task, classes: int) -> list[int]:
    """Return the number of examples, followed by the class counts."""
    return [len(examples), *task.class_counts(examples, classes)]


def _local_federation(settings: Settings, config: Mapping[str, Any]) -> Federation:
    """Return a federation of this node only."""
    changes = {"root": str(config["root"])} if "root" in config else {}
    dataset = build_data_set(str(config.get("data", settings.data)), with_changes(settings, changes))
    # An unseen domain may be at another node.
    unseen = [domain.name for domain in dataset.domains if domain.name in settings.unseen]
    federation = federate(dataset, settings.partition, unseen, settings.seed)
    return dataclasses.replace(federation, clients=(_local_client(federation, config),), unseen={})


def _local_client(federation: Federation, config: Mapping[str, Any]) -> ClientData:
    """Return the client of this node by ``client`` or ``domain`` of its configuration, or the only client."""
    known = {client.id: client for client in federation.clients}
    wanted = config.get("client")
    if wanted in known:
        return known[str(wanted)]
    found = list(known.values())
    if "domain" in config:
        domain = str(config["domain"])
        found = [client for client in found if client.domains == (domain,)]
        if not found:
            domains = [name for client in known.values() for name in client.domains]
            raise DataError(f"{federation.name} has no client with only the domain {domain!r}. {nearest(domain, domains)}")
    if len(found) != 1:
        raise DataError(
            f"{federation.name} has {len(found)} clients ({', '.join(client.id for client in found)}). Choose the one of this node with "
            "--node-config 'domain=\"NAME\"' or 'client=\"NAME\"'."
        )
    return found[0] if wanted is None else dataclasses.replace(found[0], id=plain_text(str(wanted)).strip())


def build_node(settings: Settings, config: Mapping[str, Any], home: Path | None = None) -> Node:
    # Virtual clients of one process share a workplace.
    shared = {PARTITION: 0} if PARTITION in config else dict(config)
    place = _workplace(settings_text(settings), json.dumps(shared, sort_keys=True))
    data = place.federation.clients[0]
    if place.simulated:
        order = canonical_order(map(ClientInfo.from_data, place.federation.clients))
        wanted = order[int(config[PARTITION])].id
        data = next(client for client in place.federation.clients if client.id == wanted)
    home = home or home_of(config)
    account = None if place.simulated else account_of(config, home)
    return Node(place, data, home, when_lost(config), account, min_samples(config))


def shared_workplace(settings: Settings) -> Workplace:
    """Return the workplace of all virtual clients, cached in this process."""
    return _workplace(settings_text(settings), json.dumps({PARTITION: 0}))


def min_samples(config: Mapping[str, Any]) -> int:
    wanted = config.get(MIN_SAMPLES_KEY, 1)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise SettingError(f"--node-config: {MIN_SAMPLES_KEY} must be an integer of at least 1, got {wanted!r}.")
    return wanted


def when_lost(config: Mapping[str, Any]) -> str:
    wanted = str(config.get(LOST_STATE, REFUSE))
    if wanted not in (REFUSE, RESTART):
        raise SettingError(f"--node-config: {LOST_STATE} cannot be {wanted!r}. {nearest(wanted, (REFUSE, RESTART))}")
    return wanted


@functools.lru_cache(maxsize=1)
def _workplace(settings: str, config: str) -> Workplace:
    return Workplace(read_settings(settings), json.loads(config))
