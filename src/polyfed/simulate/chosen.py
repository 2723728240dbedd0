"""Which delivery the settings ask for."""

from __future__ import annotations

from collections.abc import Collection

from polyfed.client import Workbench
from polyfed.data.federation import ClientData
from polyfed.errors import SettingError
from polyfed.settings import Settings
from polyfed.simulate.debug import Debug
from polyfed.simulate.in_process import InProcess


def delivery_for(bench: Workbench, clients: Collection[ClientData]) -> InProcess:
    """The delivery of a run."""
    refuse_unused(bench.settings)
    if bench.settings.deliver == "flower":
        from polyfed.flower.simulation import simulated

        return simulated(bench, clients)
    if bench.settings.deliver == "debug":
        return Debug(bench, clients)
    if bench.settings.deliver == "fused":
        from polyfed.simulate.fused import Fused

        return on_workers(Fused, bench, clients)
    if bench.settings.deliver == "auto":
        from polyfed.simulate.measured import Measured

        return on_workers(Measured, bench, clients)
    if bench.settings.compile != "off":
        from polyfed.simulate.compiled import compiled_steps

        compiled_steps(bench)
    return on_workers(InProcess, bench, clients)


TRAINS = {"debug": "trains in this process, step by step", "flower": "lets Flower's nodes train"}


def refuse_unused(settings: Settings) -> None:
    """Refuse what a delivery would not use; ``auto`` leaves the choice to it."""
    unused = [f"--workers {settings.workers}"] * (settings.workers not in ("1", "auto"))
    unused += ["--compile on"] * (settings.compile == "on")
    if unused and settings.deliver in TRAINS:
        how = f"--deliver {settings.deliver} {TRAINS[settings.deliver]}"
        raise SettingError(f"{how}, so {' and '.join(unused)} would not be used. Leave it out, or use another delivery.")


def on_workers(base: type[InProcess], bench: Workbench, clients: Collection[ClientData]) -> InProcess:
    """A delivery in as many processes as the settings ask for; in this one, where that is one."""
    if bench.settings.workers == "1":
        return base(bench, clients)
    from polyfed.simulate.workers import Workers, worker_count

    count = worker_count(bench, len(clients))
    return base(bench, clients) if count == 1 else Workers(bench, clients, base, count)
