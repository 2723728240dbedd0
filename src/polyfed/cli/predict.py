"""``polyfed predict``: what a run says of image files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Device, Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath
from polyfed.errors import DataError, SettingError, nearest
from polyfed.settings import CHOICES

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.tasks.task import Prediction
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.image_inputs import ImageInputs

EXAMPLE = "Example: polyfed predict runs/digits-mini-fedbn-seed0 seven.png --client pen"


def predict(
    path: RunFolderPath,
    images: Annotated[list[str], typer.Argument(metavar="IMAGES...", help="Image files, or folders of them.")],
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", help="Use this client's own model; default: the newcomer's.")
    ] = None,
    newcomer: Annotated[
        str | None,
        typer.Option("--newcomer", help=f"Local layers of the newcomer: {', '.join(CHOICES['newcomer'])}; default: the run's own."),
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
    if newcomer is not None and newcomer not in CHOICES["newcomer"]:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, CHOICES['newcomer'])}")
    files = files_of(images)
    with busy("Opening the run", quiet):
        import torch

        from polyfed.runs.image_inputs import ImageInputs
        from polyfed.runs.predictions import predicted
        from polyfed.runs.reopen import open_experiment

        experiment = open_experiment(path, device=device or "auto", load=load or None, model=model, trust=trust, notify=warn)
        whose = model_words(experiment, client, newcomer)
        newcomer = newcomer or experiment.settings.newcomer
        read, problems = read_images(files, ImageInputs.of(experiment.federation))
        scores = list(predicted(experiment, torch.stack(list(read.values())), client, newcomer)) if read else []
    for problem in problems:
        warn(problem)
    task, classes = experiment.federation.task, experiment.federation.classes
    predictions = [prediction_json(file, task.answer(scores[place], classes), task.noun) for place, file in enumerate(read)]
    if not quiet:
        _print(predictions, task.noun, f"{experiment.method}, {whose}")
    if as_json:
        print_json({"run": path, "client": client, "predictions": predictions, "unreadable": problems})
    if problems:
        raise typer.Exit(BAD_INPUT)


def model_words(experiment: Experiment, client: str | None, newcomer: str | None) -> str:
    """Whose model answers; a choice of newcomer that nobody makes use of is refused."""
    unused = client is not None or experiment.method.newcomer is not None
    if newcomer is not None and unused:
        why = f"client {client} answers" if client is not None else f"{experiment.method} decides itself what a newcomer gets"
        raise SettingError(f"--newcomer {newcomer} would not be used: {why}. Leave it out.")
    if client is not None:
        return f"client {client}"
    return "newcomer" if unused else f"newcomer, {newcomer or experiment.settings.newcomer}"


def files_of(images: Sequence[str]) -> list[str]:
    """The files, with folders replaced by the images in them."""
    from polyfed.data.images import is_image

    files: list[str] = []
    for image in images:
        files += [image] if not Path(image).is_dir() else sorted(str(p) for p in Path(image).rglob("*") if is_image(p.name))
    if not files:
        raise DataError(f"{', '.join(images)} holds no images. Give image files, or folders that hold some.")
    return files


def read_images(files: Sequence[str], inputs: ImageInputs) -> tuple[dict[str, Tensor], list[str]]:
    """Images by file, and a sentence for each that cannot be read."""
    read: dict[str, Tensor] = {}
    problems = []
    for file in files:
        try:
            read[file] = inputs.one(file)
        except DataError as error:
            problems.append(str(error))
    return read, problems


def prediction_json(file: str, found: Prediction, noun: str) -> dict[str, Any]:
    """The answer for one image; ``noun`` is what the task answers with."""
    by_class = {name: round(value, 6) for name, value in found.probabilities.items()}
    sure = None if math.isnan(found.probability) else found.probability
    return {"image": file, noun: found.label, "probability": sure, "probabilities": by_class}


def _print(predictions: list[dict[str, Any]], noun: str, title: str) -> None:
    from rich.markup import escape

    shown = table(("image", noun, "probability"), ("probability",))
    for row in predictions:
        sure = "" if row["probability"] is None else f"{row['probability']:.3f}"
        shown.add_row(escape(row["image"]), escape(row[noun]), sure)
    if predictions:
        print_table(title, shown)
