"""An experiment: everything that a run needs, built from its settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from polyfed.backends.base import Backend
from polyfed.backends.choose import BackendFor, backend_for, require_known
from polyfed.core import evaluation
from polyfed.core.data_types import Examples, Federation
from polyfed.core.evaluation import Row, models_are_equal, scored_clients
from polyfed.core.method import Method, as_method, load_file
from polyfed.core.replies import checked
from polyfed.core.rounds import Exchange, Observer, Reply, Request, SendRequest, run_exchange, run_rounds
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.data.federation_summary import RecordedInputs
from polyfed.errors import ModelError, NotFinite, RunFolderError, SettingError
from polyfed.runs.assemble import (
    build_bench,
    build_federation,
    normalised_for,
    notices,
    prepared_model,
    require_full_participation,
)
from polyfed.runs.costs import Costs, counted
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.scores import headline, require_validation
from polyfed.runs.training_settings import why_this_model, with_declared, with_one_model
from polyfed.settings import Settings, setting_names, with_changes
from polyfed.tasks.metrics import IN_DETAIL
from polyfed.tasks.task import Headline
from polyfed.trust import NamedCode, code_in

DEFAULTS = Settings()
PARTITION_SETTINGS = (*setting_names("partition"), "root")
"""Settings that specify how data is partitioned, and its folder."""
MAX_ROUNDS = 2**31


class Experiment:
    """All components of one run, ready to train."""

    def __init__(
        self,
        settings: Settings,
        data: Any = None,
        method: str | Method | None = None,
        model: Any = None,
        backend: BackendFor = backend_for,
        recorded: RecordedInputs | None = None,
    ) -> None:
        """Build everything that the settings specify.

        Args:
            settings: Settings of the run.
            data: Same as for ``polyfed.run``; overrides the settings, as ``method`` and ``model`` do.
            method: Expression of a method, or a method.
            model: Module, or function that builds one.
            backend: Creates the backend.
            recorded: Inputs of a run that is opened again. They and the model are kept, even if the defaults have changed.
        """
        if backend is backend_for:
            require_known(settings.backend)
        if settings.backend == "flower" and backend is backend_for:
            _refuse_objects({"data": data, "model": model})
        if isinstance(data, Federation) and backend is backend_for:
            reject_partition_settings(settings)
        for file in settings.load:
            load_file(file, settings.trust)
        self.given: list[str] = []
        self.objects: dict[str, str] = {}
        self.unfinished = ""
        """Warning if the state is not the final one of a run that was opened."""
        self.on_reply: Callable[[Request, Reply], None] | None = None
        """Called with every valid reply of training, before it is used."""
        self.method = as_method(settings.method if method is None else method)
        self.federation: Federation = build_federation(settings.data if data is None else data, settings, recorded)
        if recorded is not None:
            self.federation = recorded.put_into(self.federation)
        chosen = headline(settings.metric, self.federation)  # before a method pools the domains
        if self.method.population is not None:
            self.federation = self.method.population(self.federation)
        require_validation(self.federation, settings)
        self.origins: Mapping[str, str]
        settled, self.origins = with_declared(settings, self.federation, model)
        self.settings = dataclasses.replace(rounds_from_budget(settled, self.federation), method=str(self.method))
        if model is None and recorded is None:
            self.settings = with_one_model(self.settings, self.federation.default_model, [self.method])
        initial = None if settings.init is None else read_initial(settings.init)
        with threads(self.settings.threads):
            prepared = prepared_model(self.settings, self.method, self.federation, model, initial)
            if recorded is None:
                self.federation = normalised_for(prepared, self.federation)
            self.bench: Workbench = build_bench(self.settings, self.method, self.federation, prepared)
        self.set_headline(chosen)
        require_full_participation(self.settings, self.method, len(self.federation.clients))
        self.backend: Backend = backend(self.bench, self.federation.clients)
        self.costs = Costs()
        sample = self.federation.sample_input()
        self.server = Server(
            self.method,
            self.bench.plan,
            self.settings,
            self.backend.infos,
            dict(self.bench.initial),
            self.bench.model,
            input_shape=tuple(sample.shape[1:]),
            input_dtype=sample.dtype,
            task=self.federation.task,
        )
        self.notices = [
            *self.federation.notes,
            *why_this_model(settings, self.settings, self.federation, str(self.method)),
            *notices(self.settings, self.method, self.bench, len(self.federation.clients)),
        ]
        if drawn := self.scored_sample():
            self.notices.append(
                f"Every client has its own model: {drawn['scored']} of {drawn['clients']} clients, sampled with the seed, are scored "
                "(--evaluate-clients 0 scores all)."
            )

    @property
    def progress(self) -> str:
        """The last completed round, and the number of rounds."""
        return f"round {self.server.round} of {self.server.rounds}"

    def set_headline(self, chosen: Headline | None) -> None:
        """Set the primary metric; None, for runs that record none, uses the main metric of the task to select rounds."""
        self.headline = chosen
        self.bench.measure = self.federation.task.main_measure if chosen is None else chosen.measure

    @property
    def send_request(self) -> SendRequest:
        """The backend, with validated replies and counted traffic."""
        return self.checked_sender(self.backend)

    def checked_sender(self, backend: SendRequest) -> SendRequest:
        """Wrap a backend so that replies are validated first, and traffic is counted."""
        return counted(checked(backend, self.server), self.costs, self.bench.plan.entries)

    def exchange(self, exchange: Exchange[Any]) -> Any:
        return run_exchange(exchange, self.send_request)

    def train(self, observers: Sequence[Observer] = (), through: Callable[[SendRequest], SendRequest] | None = None) -> None:
        """Run the setup and the remaining rounds.

        Args:
            observers: Called after the setup and after every round.
            through: Wraps the backend, for example to record traffic or to simulate failures; replies are validated after it.
        """
        send_request = self.send_request if through is None else self.checked_sender(through(self.backend))
        if self.on_reply is not None:
            send_request = _observed(send_request, self.on_reply)
        with threads(self.settings.threads):
            run_rounds(self.method, self.server, self.backend, send_request, self.settings.rounds, observers)

    def score(self, split: str) -> list[Row]:
        """Score the current state, in detail if the metric that selects rounds needs it."""
        return self.evaluate(split, in_detail=self.bench.measure in IN_DETAIL)

    def evaluate(self, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        """Score seen clients, and newcomer models on unseen domains; ``in_detail`` adds metrics that are slower to compute."""
        choice = newcomer or self.settings.newcomer
        with threads(self.settings.threads), self.costs.clock("evaluation"):
            rows: list[Row] = self.exchange(evaluation.seen(self.server, split, in_detail))
            try:
                for domain in self.federation.unseen if split == "test" else ():
                    rows += self.unseen_rows(domain, choice, in_detail)
            except NotFinite as error:
                error.locate("", self.server.round)
                raise
        return rows

    def scored_sample(self) -> dict[str, int] | None:
        """Return how many clients are scored, out of how many; None if the scores cover all clients."""
        if models_are_equal(self.method, self.bench.plan):
            return None
        scored, clients = len(scored_clients(self.server)), len(self.server.clients)
        return {"scored": scored, "clients": clients} if scored < clients else None

    def test_sizes(self) -> dict[str, dict[str, int]]:
        """Return the number of scored test examples per view and domain."""
        return self.federation.test_sizes(None if self.scored_sample() is None else set(scored_clients(self.server)))

    def unseen_rows(self, domain: str, choice: str, in_detail: bool = False) -> list[Row]:
        examples = self.federation.unseen[domain]
        made = self.exchange(evaluation.newcomer(self.server, self.bench, choice, evaluation.inputs_of(self.bench, examples)))
        return [Row("unseen", "newcomer", domain, evaluation.score_newcomer(self.bench, made, examples, domain, in_detail))]

    def test_on(self, seen: Mapping[str, Examples], unseen: Mapping[str, Examples]) -> None:
        """Replace the test data; available clients are tested on the data of their domains."""
        clients = tuple(
            dataclasses.replace(
                client, tests={name: seen[name] for name in client.domains if name in seen and self.backend.can_read(client.id)}
            )
            for client in self.federation.clients
        )
        self.federation = dataclasses.replace(self.federation, clients=clients, unseen=unseen)
        self.backend.replace_data(clients)
        self.server.set_clients(self.backend.infos)

    def newcomer_state(self) -> dict[str, Tensor]:
        if self.method.newcomer is not None:
            made = self.exchange(evaluation.own_newcomer(self.server))
            if len(made.models) > 1:
                raise ModelError(f"{self.method} has {len(made.models)} newcomer models instead of one. Use polyfed evaluate.")
            return dict(made.models[0][1])
        return self.exchange(evaluation.averaged_state(self.server))  # type: ignore[no-any-return]

    def snapshot(self) -> Snapshot:
        """Return everything that is needed to resume the run."""
        notes = {"costs": self.costs.numbers()}
        return Snapshot(self.server.round, self.server.state, self.server.memory_state(), self.backend.client_states, notes)

    def restore(self, snapshot: Snapshot) -> None:
        self.server.round, self.server.state = snapshot.round, dict(snapshot.state)
        self.server.memory, self.server.restored_memory = {}, dict(snapshot.memory)
        self.backend.client_states = snapshot.clients
        self.backend.retain("checkpoint")
        self.costs = Costs.from_numbers(snapshot.notes["costs"])

    def plan_table(self) -> list[dict[str, Any]]:
        """Return the sharing plan per entry kind and phase, with bytes per client and round."""
        rows = []
        for start, phase in self.bench.plan.phases.items():
            groups: dict[tuple[str, str], list[str]] = {}
            for name, travel in phase.travels.items():
                groups.setdefault((self.bench.plan.entries[name].kind, travel.words), []).append(name)
            for (kind, words), names in groups.items():
                size = sum(self.bench.plan.entries[name].size for name in names)
                rows.append({"from_round": start + 1, "kind": kind, "travels": words, "entries": len(names), "bytes": size})
        return rows


def _observed(send_request: SendRequest, on_reply: Callable[[Request, Reply], None]) -> SendRequest:
    def send_and_observe(request: Request) -> Iterator[Reply]:
        for reply in send_request(request):
            on_reply(request, reply)
            yield reply

    return send_and_observe


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuse_objects(given: Mapping[str, Any]) -> None:
    """Raise an error for objects with Flower, whose nodes build everything from the settings."""
    objects = [name for name, value in given.items() if value is not None and not isinstance(value, str | Path)]
    if objects:
        raise SettingError(
            f"With backend='flower' every node builds its own {' and '.join(objects)}. Pass a name (a data set, a folder, "
            "module.path:function) instead of an object."
        )


def reject_partition_settings(settings: Settings) -> None:
    """Raise an error for partition settings, which have no effect on a federation that is already partitioned."""
    given = [name for name in PARTITION_SETTINGS if getattr(settings, name) != getattr(DEFAULTS, name)]
    if given:
        raise SettingError(
            f"{' and '.join(f'{name}=' for name in given)} has no effect on a federation, which is already partitioned. "
            "Set it when you create the federation, or pass a data set instead."
        )


def without_partition(settings: Settings) -> Settings:
    """Return the settings without partition settings, for a federation that was created with them."""
    return dataclasses.replace(settings, **{name: getattr(DEFAULTS, name) for name in PARTITION_SETTINGS})


def rounds_from_budget(settings: Settings, federation: Federation) -> Settings:
    """Convert a budget in epochs over all data to rounds."""
    if settings.total_epochs is None:
        return settings
    samples = sum(len(client.train) for client in federation.clients)
    fraction = settings.sampled(len(federation.clients)) / len(federation.clients)
    if settings.local_steps is None:
        passes = settings.local_epochs * fraction
    else:
        passes = settings.local_steps * settings.batch_size * settings.sampled(len(federation.clients)) / samples
    rounds = settings.total_epochs / passes
    if rounds >= MAX_ROUNDS:
        raise SettingError(
            f"--total-epochs {settings.total_epochs:g} needs {rounds:.3g} rounds, but the limit is {MAX_ROUNDS}. "
            "Lower --total-epochs, or let clients train longer per round."
        )
    return dataclasses.replace(settings, rounds=max(1, round(rounds)), total_epochs=None)


def read_initial(text: str) -> Mapping[str, Tensor]:
    """Read initial weights from a file or a run folder, unpickling only tensors."""
    path = Path(text)
    if os.path.isdir(path):
        snapshot, _ = RunFolder(path).checkpoints.read()
        if snapshot is None:
            raise RunFolderError(f"--init: {path} has no good checkpoint.")
        return snapshot.state
    if not os.path.isfile(path):
        raise SettingError(f"--init: file or run folder not found: {text}.")
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise SettingError(
            f"--init: cannot read weights from {text} ({type(error).__name__}). Pass a .safetensors or .pth file with a state_dict."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SettingError(f"--init: {text} does not contain a state_dict.")
    return state


def settings_given(data: Any, model: Any, values: Mapping[str, Any]) -> Settings:
    """Return the settings for arguments given in Python, with the names of objects."""
    texts: dict[str, Any] = {"data": str(data) if isinstance(data, str | Path) else getattr(data, "name", "given data")}
    if isinstance(model, str):
        texts["model"] = model
    unseen = values.get("unseen")
    settings = with_changes(Settings(**texts), {**values, **({"unseen": (unseen,)} if isinstance(unseen, str) else {})})
    settings = dataclasses.replace(settings, trust=settings.trusted().trust.adding(code_of(data)))
    if settings.root is not None and not isinstance(data, str | Path):
        raise SettingError("root= has no effect: the data was given as an object. Remove it.")
    return settings


def code_of(data: Any) -> list[NamedCode]:
    """Trust the default model of a federation object, which comes from code that already runs here."""
    return code_in(model=data.default_model) if isinstance(data, Federation) else []
