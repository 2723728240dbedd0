"""The ServerApp: waits for nodes, trains over the Grid and writes a run folder."""

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
from polyfed.flower.node.resident import exit_with, process_mark
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

REPORTED = "The nodes report these class counts; a node whose policy withholds them reports a uniform distribution."
# Settings that the server computes, and file locations.
MAY_DIFFER = ("rounds", "total_epochs", "method", "load", "root", "unseen", "backend")


@app.main()
def main(grid: Grid, context: Context) -> None:
    prepare(grid)
    log_result(run_on_grid(grid, settings_from(context.run_config), context.run_config))


def prepare(grid: Grid) -> None:
    """Set up logging and Flower's optimisations, and exit when the parent process exits."""
    _show_log()
    keep_freed_pages()
    shorten_server()
    lean_arrays()
    send_over_grid_directly(grid)
    # Flower interrupts a ServerApp whose parent exits. One that waits for its threads would ignore that and keep its run folder locked.
    exit_with(process_mark(os.getppid()), "The process that started this run")


def run_on_grid(grid: Grid, settings: Settings, config: Mapping[str, object], names: ClientNames | None = None) -> Result:
    """Train over a Grid, or resume the run in the run folder."""
    read = RunConfig.read(config)
    return _recorded(*_gathered(grid, settings, read, names or ClientNames(Path(read.out) if read.out else None)), read)


def _gathered(grid: Grid, settings: Settings, config: RunConfig, names: ClientNames) -> tuple[Settings, Federation, Roster]:
    """Wait for nodes; return the settings, placeholders for the nodes' data, and the roster."""
    for file in settings.load:
        load_file(file, settings.trust)
    if as_method(settings.method).population is not None:
        raise SettingError(
            f"{settings.method} pools the data of all clients, which over Flower stays at the nodes. Choose another method."
        )
    settings = dataclasses.replace(settings, backend="flower")
    refuse_unused(settings)
    roster = Roster(Transport(grid), config.describe_timeout, config.patience, settings.model is None, names)
    # A resumed run needs exactly its previous clients.
    clients = list(RunFolder(config.out).document().get("data", {}).get("samples", ())) if _holds_run(config.out) else []
    nodes = roster.gather(max(1, int(config.min_nodes)), config.wait, clients)
    for node in nodes:
        log.info("Client %s: %s, %d training examples.", node.client, ", ".join(node.domains), node.samples)
    unseen = unseen_at_server(settings, config.unseen_data, nodes[0])
    settings = dataclasses.replace(settings, unseen=tuple(unseen), few_shot=0)
    federation = dataclasses.replace(federation_of(nodes), unseen=unseen)
    if settings.model is None and not federation.default_model:
        raise SettingError(
            f"The default model of {nodes[0].client} is custom code, which nodes may not choose for the server. Specify the model in the "
            "app: polyfed deploy init DIR --recipe NAME --set model=NAME"
        )
    return settings, federation, roster


def _recorded(settings: Settings, federation: Federation, roster: Roster, config: RunConfig) -> Result:
    """Train and write a run folder, or resume the run in it."""
    out, callbacks = config.out, [RoundLog(roster)]

    def backend(bench: Workbench, clients: Collection[ClientData]) -> Backend:
        return FlowerBackend(bench, clients, roster, config.timeout, config.newcomer_model)

    if _holds_run(out):
        found = RunFolder(out).settings()
        if found.model is not None:
            settings = with_one_model(settings, federation.default_model, [as_method(settings.method)])
        _require_same_settings(settings, found, out)
        log.info("Resuming the run in %s.", Path(out).resolve())
        ended = resume(out, federation, Reopening(load=settings.load, trusted=settings.trust), callbacks, backend=backend)
    else:
        experiment = Experiment(settings, federation, backend=backend)
        if federation.unseen and needs_file(experiment) and not config.newcomer_model:
            raise SettingError(
                f"To test unseen domains ({', '.join(federation.unseen)}), the server needs the layers that {experiment.method} keeps "
                "at the nodes. Request them with --run-config 'newcomer-model=true', or remove unseen-data."
            )
        experiment.set_headline(as_reported(experiment))
        experiment.given = [HELD_BY_NODES]
        for notice in experiment.notices:
            log.warning("%s", notice)
        ended = train_run(experiment, RunFolder(out or _fresh_folder(experiment)), callbacks)
    if needs_file(ended.experiment) and not config.newcomer_model:
        log.info(
            "Layers stayed at the nodes, so there is no newcomer model. To request them, use --run-config 'newcomer-model=true'."
        )
    return ended


def as_reported(experiment: Experiment) -> Headline | None:
    """Return the primary metric, with the source of the class counts in its reason."""
    found = experiment.headline
    if found is None or experiment.settings.metric != AUTO or not experiment.federation.task.class_labels:
        return found
    return dataclasses.replace(found, reason=f"{found.reason} {REPORTED}")


def _holds_run(out: str) -> bool:
    return bool(out) and RunFolder(out).holds_run


def _fresh_folder(experiment: Experiment) -> Path:
    """Return a new folder in the working directory, with the name that ``polyfed run`` would give it."""
    settings = dataclasses.replace(experiment.settings, data=experiment.federation.name)
    return free_folder(Path("runs") / default_name(settings)).resolve()


def _require_same_settings(requested: Settings, found: Settings, out: str) -> None:
    """Require the settings of the run that is resumed, because the nodes use the requested ones."""
    requested = anchored(requested)
    other = [name for name in FACTS if name not in MAY_DIFFER and getattr(requested, name) != getattr(found, name)]
    if str(as_method(requested.method)) != found.method:
        other.append("method")
    if requested.total_epochs is None and requested.rounds != found.rounds:
        other.append("rounds")
    if other:
        raise SettingError(
            f"{out} contains a run with different {', '.join(other)}. Choose another out, or use the settings of the run."
        )


def _show_log() -> None:
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("polyfed: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


class RoundLog(Callback):
    """Logs every round and saves the client names."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def begin(self, run: RunState) -> None:
        self.roster.names.save()

    def after_round(self, run: RunState) -> None:
        log.info("round %d of %d", run.round, run.rounds)
        self.roster.names.save()

    def message(self, text: str) -> None:
        log.warning("%s", text)


def log_result(result: Result) -> None:
    summary = result.summary()
    for warning in result.warnings:
        log.warning("%s", warning)
    table, words = result.table(result.headline.measure), result.headline.words
    for view in ("seen", "unseen"):
        for domain, value in table[view].items():
            log.info("%s %s: %s %.4f", view, domain, words, value)
    log.info("mean %s %.4f, worst %.4f", words, table["mean"], table["worst"])
    log.info("rounds %d, digest %s", summary["rounds"], summary["digest"])
    log.info("run folder %s", summary["run"])
