"""Choose the backend that the settings specify. Backends of other layers register themselves, so this module does not import them."""

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
WHERE_TRAINED = {"debug": "trains in this process, step by step", "flower": "trains on Flower nodes"}
"""Backends that use neither worker processes nor compiled steps, and the reason."""
OWN: dict[str, type[InProcess]] = {"process": InProcess, "fused": Fused, "auto": Auto, "debug": Debug}


def backend_for(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    """Build the backend that the settings specify, with the specified number of worker processes."""
    settings = bench.settings
    refuse_unused(settings)
    if settings.backend not in OWN:
        require_known(settings.backend)
        found: BackendFor = importlib.metadata.entry_points(group=ENTRY_POINTS)[settings.backend].load()
        return found(bench, clients)
    base = OWN[settings.backend]
    if base is InProcess:
        compiled_steps(bench)
    count = 1 if base is Debug else worker_count(bench, len(clients))
    return base(bench, clients) if count == 1 else Workers(bench, clients, base, count)


def require_known(name: str) -> None:
    """Reject the name of an unregistered backend."""
    if name in OWN:
        return  # looking up entry points reads the metadata of every installed package
    known = [*OWN, *importlib.metadata.entry_points(group=ENTRY_POINTS).names]
    if name not in known:
        raise SettingError(f"There is no backend {name!r}. {nearest(name, known)}")


def refuse_unused(settings: Settings) -> None:
    """Reject settings that have no effect with the backend. The value ``auto`` is always valid."""
    unused = [f"--workers {settings.workers}"] * (settings.workers not in ("1", "auto"))
    unused += ["--compile on"] * (settings.compile == "on")
    if unused and settings.backend in WHERE_TRAINED:
        reason = f"--backend {settings.backend} {WHERE_TRAINED[settings.backend]}"
        verb, pronoun = ("have", "them") if len(unused) > 1 else ("has", "it")
        raise SettingError(f"{' and '.join(unused)} {verb} no effect: {reason}. Remove {pronoun}, or choose another backend.")
