"""Which delivery the settings ask for."""

from __future__ import annotations

from collections.abc import Collection

from polyfed.client import Workbench
from polyfed.data.federation import ClientData
from polyfed.errors import SettingError
from polyfed.simulate.debug import Debug
from polyfed.simulate.in_process import InProcess


def delivery_for(bench: Workbench, clients: Collection[ClientData]) -> InProcess:
    """The delivery of a run."""
    if bench.settings.deliver == "flower":
        from polyfed.flower.simulation import simulated

        return simulated(bench, clients)
    if bench.settings.deliver == "debug":
        if bench.settings.workers not in ("1", "auto"):
            raise SettingError(f"--deliver debug trains in this process, and --workers {bench.settings.workers} was asked for.")
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


def on_workers(base: type[InProcess], bench: Workbench, clients: Collection[ClientData]) -> InProcess:
    """A delivery in as many processes as the settings ask for; in this one, where that is one."""
    if bench.settings.workers == "1":
        return base(bench, clients)
    from polyfed.simulate.workers import Workers, worker_count

    count = worker_count(bench, len(clients))
    return base(bench, clients) if count == 1 else Workers(bench, clients, base, count)
