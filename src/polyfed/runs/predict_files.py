"""Predict image files with a run's models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core.tasks.task import Prediction
from polyfed.data.images import is_image
from polyfed.errors import DataError, SettingError, nearest
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.image_inputs import ImageInputs
from polyfed.runs.predictions import predicted
from polyfed.runs.reopen import open_experiment
from polyfed.settings import FACTS

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


@dataclass(frozen=True)
class Predictions:
    """Predictions for image files.

    Attributes:
        rows: for each image that could be read, its file (``image``), the predicted ``class`` (or what the task predicts),
            its ``probability``, and the ``probabilities`` of all classes.
        noun: what the task predicts.
        model: whose model predicted, with the method.
        unreadable: an error message for each image that could not be read.
    """

    rows: list[dict[str, Any]]
    noun: str
    model: str
    unreadable: list[str]


def predict_files(path: str | Path, images: Sequence[str], client: str | None, newcomer: str | None, how: Reopening) -> Predictions:
    """Do what ``polyfed.predict`` documents."""
    if newcomer is not None and newcomer not in FACTS["newcomer"].choices:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, FACTS['newcomer'].choices)}")
    files: list[str] = []
    for image in images:
        files += [image] if not Path(image).is_dir() else sorted(str(p) for p in Path(image).rglob("*") if is_image(p.name))
    if not files:
        raise DataError(f"{', '.join(images)} holds no images. Give image files, or folders that hold some.")
    experiment = open_experiment(path, how)
    model = f"{experiment.method}, {_model_words(experiment, client, newcomer)}"
    task, classes = experiment.federation.task, experiment.federation.classes
    read, problems = read_images(files, ImageInputs.of(experiment.federation))
    scores = list(predicted(experiment, torch.stack(list(read.values())), client, newcomer)) if read else []
    rows = [_prediction_json(file, task.answer(score, classes), task.noun) for file, score in zip(read, scores, strict=True)]
    return Predictions(rows, task.noun, model, problems)


def _model_words(experiment: Experiment, client: str | None, newcomer: str | None) -> str:
    """Name the model that predicts; refuse a choice of newcomer that changes nothing."""
    unused = client is not None or experiment.method.newcomer is not None
    if newcomer is not None and unused:
        why = f"client {client} answers" if client is not None else f"{experiment.method} decides itself what a newcomer gets"
        raise SettingError(f"--newcomer {newcomer} would not be used: {why}. Leave it out.")
    if client is not None:
        return f"client {client}"
    return "newcomer" if unused else f"newcomer, {newcomer or experiment.settings.newcomer}"


def read_images(files: Sequence[str], inputs: ImageInputs) -> tuple[dict[str, Tensor], list[str]]:
    """Return images by file, and an error message for each that cannot be read."""
    read: dict[str, Tensor] = {}
    problems = []
    for file in files:
        try:
            read[file] = inputs.one(file)
        except DataError as error:
            problems.append(str(error))
    return read, problems


def _prediction_json(file: str, found: Prediction, noun: str) -> dict[str, Any]:
    by_class = {name: round(value, 6) for name, value in found.probabilities.items()}
    probability = None if math.isnan(found.probability) else found.probability
    return {"image": file, noun: found.label, "probability": probability, "probabilities": by_class}
