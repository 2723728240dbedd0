"""The ServerApp: learns who the nodes are, trains over the Grid with the same loop as everywhere, and records a run folder."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from polyfed.backends.base import Backend
from polyfed.backends.choose import refuse_unused
from polyfed.core.data_types import ClientData, Federation
from polyfed.core.method import as_method, load_file
from polyfed.core.workbench import Workbench
from polyfed.errors import SettingError
from polyfed.flower.app import RunConfig, settings_from
from polyfed.flower.node.resident import end_when_gone, process_mark
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.server.federation import federation_of, unseen_at_server
from polyfed.flower.server.roster import ClientNames, Roster
from polyfed.flower.wire.direct_http import send_over_grid_directly
from polyfed.flower.wire.lean_objects import lean_arrays
from polyfed.flower.wire.transport import Transport
from polyfed.flower.wire.waits import shorten_server
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.final_files import needs_file
from polyfed.runs.folder.paths import Reopening, anchored, default_name, free_folder
from polyfed.runs.folder.run_folder import HELD_BY_NODES, RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.malloc import keep_freed_pages
from polyfed.runs.result import Result
from polyfed.runs.training_settings import with_one_model
from polyfed.settings import AUTO, FACTS, Settings
from polyfed.tasks.task import Headline

log = logging.getLogger("polyfed")
app = ServerApp()

REPORTED = "The nodes report these class counts; a node whose policy withholds them reports even ones."
# What the server works out for itself, or what only says where files are.
MAY_DIFFER = ("rounds", "total_epochs", "method", "load", "root", "unseen", "backend")


@app.main()
def main(grid: Grid, context: Context) -> None:
    prepare(grid)
    log_result(run_on_grid(grid, settings_from(context.run_config), context.run_config))


def prepare(grid: Grid) -> None:
    """Make this process ready for a run: its log, shorter waits, faster exchanges, and an end when who started it has gone."""
    _show_log()
    keep_freed_pages()
    shorten_server()
    lean_arrays()
    send_over_grid_directly(grid)
    # Flower interrupts a ServerApp whose parent has gone, but one that waits for its threads does not hear that, and holds its run folder.
    end_when_gone(process_mark(os.getppid()), "The process that started this run")


def run_on_grid(grid: Grid, settings: Settings, config: Mapping[str, object], names: ClientNames | None = None) -> Result:
    """Train over a Grid; where the run folder holds a run, that run goes on."""
    read = RunConfig.read(config)
    return _recorded(*_gathered(grid, settings, read, names or ClientNames(Path(read.out) if read.out else None)), read)


def _gathered(grid: Grid, settings: Settings, config: RunConfig, names: ClientNames) -> tuple[Settings, Federation, Roster]:
    """The nodes of a run once enough of them have described themselves: its settings, placeholders for their data, and who they are."""
    for file in settings.load:
        load_file(file, settings.trust)
    if as_method(settings.method).population is not None:
        raise SettingError(f"{settings.method} brings the data of all clients together; over Flower they stay where they are.")
    settings = dataclasses.replace(settings, backend="flower")
    refuse_unused(settings)
    roster = Roster(Transport(grid), config.describe_timeout, config.patience, settings.model is None, names)
    # The clients of a run that is to go on: with fewer, or others, it would be another run.
    clients = list(RunFolder(config.out).document().get("data", {}).get("samples", ())) if _holds_run(config.out) else []
    nodes = roster.gather(max(1, int(config.min_nodes)), config.wait, clients)
    for node in nodes:
        log.info("Client %s: %s, %d training examples.", node.client, ", ".join(node.domains), node.samples)
    unseen = unseen_at_server(settings, config.unseen_data, nodes[0])
    settings = dataclasses.replace(settings, unseen=tuple(unseen), few_shot=0)
    federation = dataclasses.replace(federation_of(nodes), unseen=unseen)
    if settings.model is None and not federation.default_model:
        raise SettingError(
            f"The data of {nodes[0].client} bring a model by the name of code, and nodes may not name code to the server. Name the model "
            "in the app: polyfed deploy init DIR --recipe NAME --set model=NAME"
        )
    return settings, federation, roster


def _recorded(settings: Settings, federation: Federation, roster: Roster, config: RunConfig) -> Result:
    """Train and write a run folder, or go on with the run that is in it."""
    out, callbacks = config.out, [RoundLog(roster)]

    def backend(bench: Workbench, clients: Collection[ClientData]) -> Backend:
        return FlowerBackend(bench, clients, roster, config.timeout, config.newcomer_model)

    if _holds_run(out):
        found = RunFolder(out).settings()
        if found.model is not None:
            settings = with_one_model(settings, federation.default_model, [as_method(settings.method)])
        _refuse_other_settings(settings, found, out)
        log.info("Going on with the run in %s.", Path(out).resolve())
        ended = resume(out, federation, Reopening(load=settings.load, trusted=settings.trust), callbacks, backend=backend)
    else:
        experiment = Experiment(settings, federation, backend=backend)
        if federation.unseen and needs_file(experiment) and not config.newcomer_model:
            raise SettingError(
                f"To test unseen domains ({', '.join(federation.unseen)}) the server needs the layers that {experiment.method} keeps "
                "at the nodes. Let it ask for them (--run-config 'newcomer-model=true'), or leave unseen-data out."
            )
        experiment.set_headline(as_reported(experiment))
        experiment.given = [HELD_BY_NODES]
        for notice in experiment.notices:
            log.warning("%s", notice)
        ended = train_run(experiment, RunFolder(out or _fresh_folder(experiment)), callbacks)
    if needs_file(ended.experiment) and not config.newcomer_model:
        log.info(
            "Layers stayed at the nodes, so there is no model for newcomers. --run-config 'newcomer-model=true' lets the server ask for them."
        )
    return ended


def as_reported(experiment: Experiment) -> Headline | None:
    """Return the metric with its reason: the server has the class counts that nodes report, and no labels."""
    found = experiment.headline
    if found is None or experiment.settings.metric != AUTO or not experiment.federation.task.class_labels:
        return found
    return dataclasses.replace(found, reason=f"{found.reason} {REPORTED}")


def _holds_run(out: str) -> bool:
    return bool(out) and RunFolder(out).holds_run


def _fresh_folder(experiment: Experiment) -> Path:
    """A new run folder where the server runs, named after the nodes' data as ``polyfed run`` would name it."""
    settings = dataclasses.replace(experiment.settings, data=experiment.federation.name)
    return free_folder(Path("runs") / default_name(settings)).resolve()


def _refuse_other_settings(asked: Settings, found: Settings, out: str) -> None:
    """A run goes on with its own settings only, since the nodes use those that are asked for now."""
    asked = anchored(asked)
    names = [name for name in FACTS if name not in MAY_DIFFER]
    other = [name for name in names if getattr(asked, name) != getattr(found, name)]
    if str(as_method(asked.method)) != found.method:
        other.append("method")
    if asked.total_epochs is None and asked.rounds != found.rounds:
        other.append("rounds")
    if other:
        raise SettingError(f"{out} holds a run with other settings ({', '.join(other)}). Name another out, or use its settings.")


def _show_log() -> None:
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("polyfed: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


class RoundLog(Callback):
    """Log every round, and write down the names of the nodes."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def begin(self, run: RunState) -> None:
        self.roster.names.remember()

    def after_round(self, run: RunState) -> None:
        log.info("round %d of %d", run.round, run.rounds)
        self.roster.names.remember()

    def message(self, text: str) -> None:
        log.warning("%s", text)


def log_result(result: Result) -> None:
    summary = result.summary()
    for sentence in result.warnings:
        log.warning("%s", sentence)
    table, words = result.table(result.headline.measure), result.headline.words
    for view in ("seen", "unseen"):
        for domain, value in table[view].items():
            log.info("%s %s: %s %.4f", view, domain, words, value)
    log.info("mean %s %.4f, worst %.4f", words, table["mean"], table["worst"])
    log.info("rounds %d, digest %s", summary["rounds"], summary["digest"])
    log.info("run folder %s", summary["run"])
