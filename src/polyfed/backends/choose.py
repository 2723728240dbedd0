"""Which backend the settings ask for. A backend of another layer registers itself, so nothing here imports it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection
from typing import TypeAlias

from polyfed.backends.auto import Auto
from polyfed.backends.base import Backend
from polyfed.backends.compiled import compiled_steps
from polyfed.backends.fused import Fused
from polyfed.backends.in_process import Debug, InProcess
from polyfed.backends.workers import Workers, worker_count
from polyfed.core.data_types import ClientData
from polyfed.core.workbench import Workbench
from polyfed.errors import SettingError, nearest
from polyfed.settings import Settings

BackendFor: TypeAlias = Callable[[Workbench, Collection[ClientData]], Backend]
ENTRY_POINTS = "polyfed.backends"
TRAINS = {"debug": "trains in this process, step by step", "flower": "lets Flower's nodes train"}
"""Backends that use neither worker processes nor compiled steps, and why."""
OWN: dict[str, type[InProcess]] = {"process": InProcess, "fused": Fused, "auto": Auto, "debug": Debug}


def backend_for(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """Make the backend that the settings ask for, in as many processes."""
    settings = bench.settings
    refuse_unused(settings)
    if settings.backend not in OWN:
        require_known(settings.backend)
        found: BackendFor = importlib.metadata.entry_points(group=ENTRY_POINTS)[settings.backend].load()
        return found(bench, clients)
    base = OWN[settings.backend]
    if base is InProcess:
        compiled_steps(bench)
    count = 1 if base is Debug or settings.workers == "1" else worker_count(bench, len(clients))
    return base(bench, clients) if count == 1 else Workers(bench, clients, base, count)


def require_known(name: str) -> None:
    """Refuse a backend that nobody has registered, before anything is prepared."""
    if name in OWN:
        return  # looking entry points up reads the metadata of every installed package
    known = [*OWN, *importlib.metadata.entry_points(group=ENTRY_POINTS).names]
    if name not in known:
        raise SettingError(f"backend cannot be {name!r}. {nearest(name, known)}")


def refuse_unused(settings: Settings) -> None:
    """Refuse what a backend would not use; ``auto`` leaves the choice to it."""
    unused = [f"--workers {settings.workers}"] * (settings.workers not in ("1", "auto"))
    unused += ["--compile on"] * (settings.compile == "on")
    if unused and settings.backend in TRAINS:
        how = f"--backend {settings.backend} {TRAINS[settings.backend]}"
        raise SettingError(f"{how}, so {' and '.join(unused)} would not be used. Leave it out, or use another backend.")
