"""``polyfed predict``: classes of image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.evaluate import input_shape
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Device, Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath
from polyfed.errors import DataError, SettingError, nearest
from polyfed.settings import CHOICES

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.runs.experiment import Experiment

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
    """Say the class and its probability for each image; images are resized to the run's input size."""
    listen(quiet)
    if newcomer is not None and newcomer not in CHOICES["newcomer"]:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, CHOICES['newcomer'])}")
    files = files_of(images)
    with busy("Opening the run", quiet):
        from polyfed.runs.reopen import open_experiment

        experiment = open_experiment(path, device=device or "auto", load=load or None, model=model, trust=trust, notify=warn)
        whose = model_words(experiment, client, newcomer)
        newcomer = newcomer or experiment.settings.newcomer
        shape = input_shape(experiment)
        read, problems = read_images(files, shape)
        scores = predicted(experiment, read, client, newcomer) if read else []
    for problem in problems:
        warn(problem)
    predictions = [prediction_json(file, scores[place], experiment.federation.classes) for place, file in enumerate(read)]
    if not quiet:
        _print(predictions, f"{experiment.method}, {whose}")
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


def read_images(files: Sequence[str], shape: tuple[int, int, int]) -> tuple[dict[str, Tensor], list[str]]:
    """Images by file, and a sentence for each that cannot be read."""
    read: dict[str, Tensor] = {}
    problems = []
    for file in files:
        try:
            read[file] = read_image(file, shape)
        except DataError as error:
            problems.append(str(error))
    return read, problems


def read_image(file: str, shape: tuple[int, int, int]) -> Tensor:
    """One image as bytes in the shape of the run's inputs."""
    import numpy as np
    import torch
    from PIL import Image

    from polyfed.data.images import opened

    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(f"The inputs of this run have {channels} channels; images have 1 or 3.")
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    image = opened(content, file)
    if channels == 1:
        image = image.convert("L")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.array(image).reshape(height, width, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def predicted(experiment: Experiment, read: dict[str, Tensor], client: str | None, newcomer: str) -> list[Tensor]:
    """Probabilities of each image, by a client's own model or by the newcomer's."""
    import torch

    from polyfed.core.client import probabilities
    from polyfed.core.data_types import ArrayExamples
    from polyfed.core.device import CPU
    from polyfed.core.evaluation import inputs_of
    from polyfed.runs.experiment import threads

    bench = experiment.bench
    batches = inputs_of(bench, ArrayExamples(torch.stack(list(read.values())), torch.zeros(len(read))))
    with threads(experiment.settings.threads), torch.no_grad():
        total = torch.zeros(len(read), bench.classes)
        for weight, load in models_of(experiment, client, newcomer, batches):
            load()
            bench.model.eval()
            total += weight * torch.cat([probabilities(bench, x).to(CPU) for x in batches()])
    return list(total)


def models_of(experiment: Experiment, client: str | None, newcomer: str, batches: Any) -> list[tuple[float, Any]]:
    """Weights, and functions that put each model on the bench."""
    from polyfed.core import evaluation
    from polyfed.core.client import Client

    server, bench, backend = experiment.server, experiment.bench, experiment.backend
    if client is None:
        made = experiment.talk(evaluation.newcomer(server, bench, newcomer, batches))
        whole = sum(weight for weight, _ in made.models)
        states = [(weight / whole, {n: v for n, v in state.items() if n in bench.live}) for weight, state in made.models]
        return [(weight, lambda state=state: bench.load(state)) for weight, state in states]
    if client not in backend.data:
        raise DataError(f"There is no client {client!r}. {nearest(client, backend.data)}")
    for prepare in experiment.method.before_evaluation:
        experiment.talk(prepare(server))
    at_work = Client(backend.data[client], bench, backend.state_of(client), server.round)
    return [(1.0, lambda: at_work.receive(server.outgoing(client)))]


def prediction_json(file: str, scores: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """The answer for one image."""
    place = int(scores.argmax())
    by_class = {name: round(float(score), 6) for name, score in zip(classes, scores, strict=True)}
    return {"image": file, "class": classes[place], "probability": float(scores[place]), "probabilities": by_class}


def _print(predictions: list[dict[str, Any]], title: str) -> None:
    from rich.markup import escape

    shown = table(("image", "class", "probability"), ("probability",))
    for row in predictions:
        shown.add_row(escape(row["image"]), escape(row["class"]), f"{row['probability']:.3f}")
    if predictions:
        print_table(title, shown)
