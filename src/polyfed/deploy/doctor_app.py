"""The ServerApp of ``polyfed serve --doctor``: asks the nodes for sums, and writes what the doctor says of their federation."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from polyfed.deploy.private_files import write_private
from polyfed.deploy.server_app import FOLDER_VARIABLE, AuditedGrid, EnrolledNames
from polyfed.deploy.server_folder import ServerFolder
from polyfed.diagnosis.aggregates import measured_from_aggregates, to_be_looked_at
from polyfed.diagnosis.examine import Diagnosis, concluded
from polyfed.flower.client_names import ClientNames
from polyfed.flower.run_config import read_settings, settings_from
from polyfed.flower.server_app import gathered, prepare, reaching
from polyfed.settings import Settings

log = logging.getLogger("polyfed")
app = ServerApp()


def examine_on_grid(grid: Grid, settings: Settings, config: Mapping[str, object], names: ClientNames | None = None) -> Diagnosis:
    """Look at the nodes of a Grid. What a run would cost is measured here, on placeholders of the same sizes.

    Args:
        grid: reaches the nodes, which run with ``to_be_looked_at(settings)``.
        settings: of the run that the doctor is asked about.
        config: the run's configuration.
        names: says whose a client's name is.
    """
    begun = time.process_time()
    # Unseen domains are for tests, and nothing is tested.
    settings = dataclasses.replace(settings, unseen=())
    _, federation, roster = gathered(grid, to_be_looked_at(settings), config, names or ClientNames())
    settings = dataclasses.replace(settings, data=federation.name)
    measures = measured_from_aggregates(federation, None, settings, reaching(roster, config))
    return dataclasses.replace(concluded(measures, federation, None, settings, begun), command="")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Say what the doctor finds, and leave it in the folder of this server."""
    folder = ServerFolder(Path(os.environ[FOLDER_VARIABLE]))
    prepare(grid)
    examined = read_settings(folder.examined.read_text(encoding="utf-8"))
    settings = dataclasses.replace(examined, load=settings_from(context.run_config).load)
    found = examine_on_grid(AuditedGrid(grid, folder), settings, context.run_config, EnrolledNames(folder))
    write_private(folder.diagnosis, json.dumps(found.as_json(), indent=1))
    for line in repr(found).splitlines():
        log.info("%s", line)
