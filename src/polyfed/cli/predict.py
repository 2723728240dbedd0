"""``polyfed predict``: predictions for image files."""

from __future__ import annotations

from typing import Any

import click

from polyfed import api
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import REOPEN_OPTIONS, argument, command, shared
from polyfed.cli.output import log_to_stderr, print_json, status, warn
from polyfed.cli.tables import print_table
from polyfed.settings import FACTS


@command("predict", "polyfed predict runs/digits-mini-fedbn-seed0 seven.png --client pen")
@shared("run")
@argument("images", "IMAGES...", "Image files, or folders that contain images.", nargs=-1, required=True)
@click.option("--client", metavar="ID", help="Use this client's model. Default: the newcomer model.")
@click.option(
    "--newcomer",
    help=f"{FACTS['newcomer'].doc} Default: as in the run.",
)
@shared(*REOPEN_OPTIONS, "json", "quiet")
def predict(path: str, images: tuple[str, ...], client: str | None, as_json: bool, quiet: bool, **how: Any) -> None:
    """Predict the class and probability of each image (or labels, values or pixel fractions, depending on the task).

    Images are preprocessed as in the run.
    """
    log_to_stderr(quiet)
    with status("Opening the run", quiet):
        found = api.predict(path, images, client=client, notify=warn, **how)
    for problem in found.unreadable:
        warn(problem)
    if not quiet and found.rows:
        cells = [
            (row["image"], row[found.noun], "" if row["probability"] is None else f"{row['probability']:.3f}") for row in found.rows
        ]
        print_table(found.model, ("image", found.noun, "probability"), cells, numbers=("probability",))
    if as_json:
        print_json({"run": path, "client": client, "predictions": found.rows, "unreadable": found.unreadable})
    if found.unreadable:
        raise click.exceptions.Exit(BAD_INPUT)
