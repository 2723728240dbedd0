"""Callbacks that log the metrics of a run to TensorBoard, MLflow or Weights & Biases. Each needs an extra package."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.result import Result
from polyfed.runs.scores import VIEWS, Domains, domains_of
from polyfed.tasks.metrics import MEASURES


def _training_numbers(run: RunState) -> Iterator[tuple[str, float]]:
    if run.losses:
        yield "training/loss", sum(run.losses.values()) / len(run.losses)
        yield from ((f"training/loss/{client}", loss) for client, loss in run.losses.items())
    yield "traffic/bytes_up", run.bytes_up
    yield "traffic/bytes_down", run.bytes_down


def _scores(domains: Domains) -> list[tuple[str, float]]:
    return [
        (f"{view}/{domain}/{name}", float(numbers[name]))
        for (view, domain), numbers in domains.items()
        for name in (*MEASURES, "majority_rate")
        if name in numbers
    ]


class Tracker(Callback):
    """Base class: logs numbers per round."""

    def __init__(self) -> None:
        self.scored_round = -1

    def write(self, round_number: int, numbers: Sequence[tuple[str, float]]) -> None:
        raise NotImplementedError

    def after_round(self, run: RunState) -> None:
        self.write(run.round, list(_training_numbers(run)))

    def after_evaluation(self, run: RunState) -> None:
        if any(row.view in VIEWS for row in run.scores):
            self.scored_round = run.round
        self.write(run.round, [(name, value) for name, value in _scores(domains_of(run.scores)) if math.isfinite(value)])

    def end(self, result: Result) -> None:
        """Write the scores of the final model, if they have not been written yet."""
        number = result.experiment.server.round
        if self.scored_round != number:
            self.write(number, _scores({key: value for key, value in result.domains.items() if key[0] in VIEWS}))
        self.close()

    def close(self) -> None:
        """Finish writing."""


class TensorBoard(Tracker):
    """Writes event files to the folder ``tensorboard`` of the run folder."""

    def begin(self, run: RunState) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        if run.path is None:
            raise SettingError("track='tensorboard' writes to the run folder. Specify one: out=DIR.")
        self.writer = SummaryWriter(str(Path(run.path) / "tensorboard"))
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in run.settings.to_dict().items()))

    def write(self, round_number: int, numbers: Sequence[tuple[str, float]]) -> None:
        for name, value in numbers:
            self.writer.add_scalar(name, value, round_number)

    def close(self) -> None:
        self.writer.close()


class MLflow(Tracker):
    """Writes an MLflow run to the store at ``MLFLOW_TRACKING_URI``, by default ``mlflow.db`` in the working folder."""

    def begin(self, run: RunState) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _missing("mlflow") from error
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri("sqlite:///mlflow.db")
        self.client = mlflow.MlflowClient()
        name = f"polyfed {run.data}"
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(name)
        self.run = self.client.create_run(experiment, run_name=f"{run.method}, seed {run.seed}").info.run_id
        for key, value in run.settings.to_dict().items():
            self.client.log_param(self.run, key, str(value)[:500])

    def write(self, round_number: int, numbers: Sequence[tuple[str, float]]) -> None:
        for name, value in numbers:
            key = "".join(char if char.isalnum() or char in "_-./ " else "_" for char in name)
            self.client.log_metric(self.run, key, value, step=round_number)

    def close(self) -> None:
        self.client.set_terminated(self.run)


class WeightsAndBiases(Tracker):
    """Writes a Weights & Biases run; ``WANDB_MODE=offline`` writes files only."""

    def begin(self, run: RunState) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self.run: Any = wandb.init(
            project="polyfed",
            name=f"{run.data} {run.method} seed {run.seed}",
            config=run.settings.to_dict(),
            dir=run.path,
            reinit="create_new",
        )

    def write(self, round_number: int, numbers: Sequence[tuple[str, float]]) -> None:
        self.run.log({"round": round_number, **dict(numbers)})

    def close(self) -> None:
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def trackers(names: str | Sequence[str]) -> list[Callback]:
    chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        if name not in TRACKERS:
            raise SettingError(f"track cannot be {name!r}. {nearest(name, TRACKERS)}")
    return [TRACKERS[name]() for name in dict.fromkeys(chosen)]


def _missing(name: str) -> PolyfedError:
    return PolyfedError(f"--track {name} needs {name}, which is not installed: pip install 'polyfed[{name}]'.")
