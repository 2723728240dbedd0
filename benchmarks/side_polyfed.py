"""Contender: polyfed, in process or by a faster path that its settings name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from contenders import Contender
from turns import CannotTakePart, Turns
from works import LEARNING_RATE, Work, build_model, federation

from polyfed.backends.in_process import InProcess
from polyfed.core.server import Server
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.runs.malloc import keep_freed_pages
from polyfed.settings import Settings, setting_names


def settings_for(work: Work, rounds: int, threads: int = 1, **options: Any) -> Settings:
    """The settings of a work. No evaluation, no folder."""
    unknown = [name for name in options if name not in setting_names()]
    if unknown:
        raise CannotTakePart(f"polyfed has no setting {unknown[0]!r} yet")
    per_round = work.a_round if work.sampled else None
    values = {"rounds": rounds, "batch_size": work.batch, "lr": LEARNING_RATE, "threads": threads, "clients_per_round": per_round}
    try:
        return Settings(**values, **options)
    except SettingError as error:
        raise CannotTakePart(str(error)) from error


def require_own_path(experiment: Experiment, options: dict[str, str]) -> None:
    """Refuse a setting that is accepted but does nothing: the ordinary path must not be reported under another name."""
    backend = experiment.backend
    within = getattr(backend, "inner", backend)
    if "workers" in options and (within is backend or backend.pace is not None):
        raise CannotTakePart(f"polyfed still uses one process ({type(backend).__name__}) with workers {options['workers']}")
    if options.get("backend") == "fused" and type(within) is InProcess:
        raise CannotTakePart("polyfed still uses the ordinary path with backend fused")


def require_compiled(options: dict[str, str]) -> None:
    """torch's compiler leaves what it built in the driver's cache folder, whichever process it ran in; an empty one proves it did not."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if options.get("compile") == "on" and cache and not any(Path(cache).rglob("*.so")):
        raise CannotTakePart("polyfed compiled nothing with compile on")


def run(work: Work, contender: Contender, turns: Turns) -> None:
    """Train with the public API; an observer waits for the driver after the setup and after each round."""
    keep_freed_pages()  # as the command line does
    options = dict(contender.options)
    settings = settings_for(work, turns.rounds, contender.threads, **options)
    try:
        experiment = Experiment(settings, federation(work), "fedavg", build_model(work))
    except (SettingError, NotImplementedError) as error:
        raise CannotTakePart(str(error)) from error
    require_own_path(experiment, options)

    def wait(server: Server) -> None:
        if server.round == 1:
            require_compiled(options)
        if server.round:
            turns.end()
        if not turns.is_over:
            turns.begin()

    experiment.train([wait])
