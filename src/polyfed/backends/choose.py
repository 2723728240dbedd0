"""Which backend the settings ask for. A backend of another layer registers itself, so nothing here imports it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection
from typing import TypeAlias

from polyfed.backends.auto import Auto
from polyfed.backends.base import Backend
from polyfed.backends.compiled import compiled_steps
from polyfed.backends.debug import Debug
from polyfed.backends.fused import Fused
from polyfed.backends.in_process import InProcess
from polyfed.backends.workers import Workers, worker_count
from polyfed.core.data_types import ClientData
from polyfed.core.workbench import Workbench
from polyfed.errors import SettingError, nearest
from polyfed.settings import Settings

BackendFor: TypeAlias = Callable[[Workbench, Collection[ClientData]], Backend]
ENTRY_POINTS = "polyfed.backends"
TRAINS = {"debug": "trains in this process, step by step", "flower": "lets Flower's nodes train"}
"""Backends that use neither worker processes nor compiled steps, and why."""


def backend_for(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """The backend of a run."""
    refuse_unused(bench.settings)
    name = bench.settings.backend
    return OWN[name](bench, clients) if name in OWN else registered(name)(bench, clients)


def require_known(name: str) -> None:
    """Refuse a backend that nobody has registered, before anything is prepared."""
    if name in OWN:
        return  # looking entry points up reads the metadata of every installed package
    known = [*OWN, *importlib.metadata.entry_points(group=ENTRY_POINTS).names]
    if name not in known:
        raise SettingError(f"backend cannot be {name!r}. {nearest(name, known)}")


def registered(name: str) -> BackendFor:
    """A backend that a package registers by an entry point, as polyfed's own Flower backend does."""
    require_known(name)
    found: BackendFor = importlib.metadata.entry_points(group=ENTRY_POINTS)[name].load()
    return found


def process(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """Clients one by one, perhaps in worker processes or with compiled steps."""
    if bench.settings.compile != "off":
        compiled_steps(bench)
    return on_workers(InProcess, bench, clients)


def fused(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """Clients stacked."""
    return on_workers(Fused, bench, clients)


def auto(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """Whichever of the two is faster."""
    return on_workers(Auto, bench, clients)


OWN: dict[str, BackendFor] = {"process": process, "fused": fused, "auto": auto, "debug": Debug}


def refuse_unused(settings: Settings) -> None:
    """Refuse what a backend would not use; ``auto`` leaves the choice to it."""
    unused = [f"--workers {settings.workers}"] * (settings.workers not in ("1", "auto"))
    unused += ["--compile on"] * (settings.compile == "on")
    if unused and settings.backend in TRAINS:
        how = f"--backend {settings.backend} {TRAINS[settings.backend]}"
        raise SettingError(f"{how}, so {' and '.join(unused)} would not be used. Leave it out, or use another backend.")


def on_workers(base: type[InProcess], bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """A backend in as many processes as the settings ask for; in this one, where that is one."""
    if bench.settings.workers == "1":
        return base(bench, clients)
    count = worker_count(bench, len(clients))
    return base(bench, clients) if count == 1 else Workers(bench, clients, base, count)
