"""``polyfed predict``: what a run says of image files."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.api import predict as predict_images
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Device, Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath
from polyfed.settings import FACTS

EXAMPLE = "Example: polyfed predict runs/digits-mini-fedbn-seed0 seven.png --client pen"


def predict(
    path: RunFolderPath,
    images: Annotated[list[str], typer.Argument(metavar="IMAGES...", help="Image files, or folders of them.")],
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", help="Use this client's own model; default: the newcomer's.")
    ] = None,
    newcomer: Annotated[
        str | None,
        typer.Option(
            "--newcomer", help=f"Local layers of the newcomer: {', '.join(FACTS['newcomer'].choices)}; default: the run's own."
        ),
    ] = None,
    device: Device = None,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say the class and its probability for each image (or what the task has: labels, numbers, shares of pixels); images are read as the run's own were."""
    listen(quiet)
    from rich.markup import escape

    with busy("Opening the run", quiet):
        found = predict_images(
            path,
            images,
            client=client,
            newcomer=newcomer,
            device=device or "auto",
            load=load or None,
            model=model,
            trust=trust,
            notify=warn,
        )
    for problem in found.unreadable:
        warn(problem)
    if not quiet and found.rows:
        shown = table(("image", found.noun, "probability"), ("probability",))
        for row in found.rows:
            probability = "" if row["probability"] is None else f"{row['probability']:.3f}"
            shown.add_row(escape(row["image"]), escape(row[found.noun]), probability)
        print_table(found.model, shown)
    if as_json:
        print_json({"run": path, "client": client, "predictions": found.rows, "unreadable": found.unreadable})
    if found.unreadable:
        raise typer.Exit(BAD_INPUT)
