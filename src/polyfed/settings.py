"""The settings of a run, with the same names on the command line, in recipes and in Python; ``FACTS`` describes each of them."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.errors import SettingError, nearest
from polyfed.schedule import schedule_factor
from polyfed.setting_facts import Role, UnsetCount, UnsetName, UnsetRate, facts_of, setting
from polyfed.trust import NOTHING, Trust, code_in

AUTO = "auto"
MEAN_LAST = r"mean_last\(([1-9]\d{0,5})\)"
EARLY_STOPPING = r"([a-z][a-z0-9_]*)\(patience=([1-9]\d{0,5})\)"
BY_VALIDATION = ("best_validation", "best_local_validation")
"""Selections of the best round on validation data, by the models after averaging or by the client models before it."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    data: str = setting("digits-mini", "Data set name, or image folder root/<domain>/<class>/*.", "Data", "task")
    root: str | None = setting(None, "Folder with the data set files.", "Data", "machine")
    task: str = setting(
        AUTO,
        "Task: classification, multilabel, regression, segmentation, or auto (inferred from the data).",
        "Model and method",
        "task",
        choices=(AUTO, "classification", "multilabel", "regression", "segmentation"),
    )
    partition: str = setting("domain", "How to split domains into clients (polyfed ls partitions).", "Data", "partition")
    unseen: tuple[str, ...] = setting((), "Domain to hold out of training; repeatable.", "Data", "partition")
    unseen_part: str = setting(
        "test", "Split of an unseen domain to test on: test or all.", "Data", "partition", choices=("test", "all")
    )
    few_shot: int = setting(
        0, "Number of images from the unseen domain that each client trains on.", "Data", "partition", minimum=0
    )
    method: str = setting("fedavg", "Method expression, for example: fedbn + agc(clip=1.28).", "Model and method", "run")
    model: str | None = setting(
        None, "Model name, or module.path:function. Default: the default model of the data set.", "Model and method", "task"
    )
    head: str | None = setting(None, "Name of the output layer, if it cannot be detected.", "Model and method", "task")
    init: str | None = setting(None, "Initial weights: a .safetensors or .pth file, or a run folder.", "Model and method", "task")
    loss: str = setting(
        AUTO, "Loss function (polyfed ls losses); auto selects the default of the task.", "Model and method", "training"
    )
    rounds: int = setting(20, "Number of rounds.", "Training", "budget", minimum=1)
    total_epochs: float | None = setting(
        None, "Budget in passes over all data, instead of --rounds.", "Training", "budget", above=0
    )
    local_epochs: int = setting(1, "Local epochs per round.", "Training", "training", minimum=1)
    local_steps: int | None = setting(None, "Local steps per round, instead of --local-epochs.", "Training", "training", minimum=1)
    batch_size: int = setting(
        UnsetCount(32), "Training batch size. Some data sets and models override this default.", "Training", "training", minimum=1
    )
    sampling: str = setting(
        "shuffled",
        "Sampling of training images: shuffled (each once per epoch), or balanced (all classes of a client equally likely).",
        "Training",
        "training",
        choices=("shuffled", "balanced"),
    )
    lr: float = setting(
        UnsetRate(0.05),
        "Client learning rate. Some data sets and models override this default.",
        "Training",
        "training",
        minimum=0,
    )
    schedule: str = setting(
        "constant", "Learning rate schedule: constant, cosine, or steps(at=(0.5, 0.75), factor=0.1).", "Training", "training"
    )
    optimizer: str = setting(
        UnsetName("sgd"),
        "Client optimizer: sgd, adam or adamw. Some data sets and models override this default.",
        "Training",
        "training",
        choices=("sgd", "adam", "adamw"),
    )
    momentum: float = setting(0.0, "SGD momentum.", "Training", "training", minimum=0)
    weight_decay: float = setting(0.0, "Weight decay.", "Training", "training", minimum=0)
    clients_per_round: float | None = setting(
        None, "Clients per round: a number, or a fraction below 1. Default: all.", "Clients", "budget"
    )
    weights: str = setting(
        "samples", "Client weights for averaging: samples or uniform.", "Clients", "training", choices=("samples", "uniform")
    )
    max_weight_share: float | None = setting(
        None,
        "Maximum fraction of the total weight for a single client. Default: no limit.",
        "Clients",
        "training",
        maximum=1,
        above=0,
    )
    max_update_norm: float | None = setting(
        None, "Maximum norm of a client update; larger updates are scaled down.", "Clients", "training", above=0
    )
    drop: float = setting(
        0.0, "Fraction of clients that fail to reply, for simulating failures.", "Clients", "training", minimum=0, maximum=1
    )
    min_share: float = setting(
        0.5,
        "Minimum fraction of requested clients that must reply; otherwise the round is retried.",
        "Clients",
        "training",
        minimum=0,
        maximum=1,
    )
    retries: int = setting(3, "Maximum number of retries per round.", "Clients", "training", minimum=0)
    on_nan: str = setting(
        "stop",
        "How to handle a NaN or infinite client loss: stop the run, or drop the reply.",
        "Clients",
        "training",
        choices=("stop", "drop"),
    )
    last_batch: str = setting(
        "merge",
        "How to handle a final batch of one sample with batch norm: merge, drop, keep or error.",
        "Training",
        "training",
        choices=("merge", "drop", "keep", "error"),
    )
    selection: str = setting(
        "last",
        "Results to report. last: the last round. mean_last(10): the mean of the last ten rounds, with the final model. "
        "best_validation: the round with the best mean validation score of the training clients. best_local_validation: the "
        "same, scored before averaging and weighted by training size.",
        "Evaluation",
        "training",
        choices=("last", "mean_last(10)", "best_validation", "best_local_validation"),
        pattern=MEAN_LAST,
    )
    early_stopping: str | None = setting(
        None,
        "Stop if a validation metric has not improved for N evaluations: accuracy(patience=N), or auto(patience=N).",
        "Evaluation",
        "budget",
        pattern=EARLY_STOPPING,
        takes="a metric with its patience, such as accuracy(patience=5)",
    )
    evaluate_every: int = setting(
        0,
        "Evaluate every N rounds. 0: only after the last round. With best_validation or best_local_validation, this applies to "
        "validation data (0: every round), and test data is evaluated once, at the end.",
        "Evaluation",
        "scoring",
        minimum=0,
    )
    evaluate_last: int = setting(0, "Also evaluate after each of the last N rounds.", "Evaluation", "scoring", minimum=0)
    evaluate_clients: int = setting(
        1000,
        "Number of clients to evaluate if their models differ (random, stratified by domain; 0: all).",
        "Evaluation",
        "task",
        minimum=0,
    )
    newcomer: str = setting(
        "averaged",
        "How to build the local layers of a newcomer: averaged, re-estimated, nearest or ensemble.",
        "Evaluation",
        "task",
        choices=("averaged", "re-estimated", "nearest", "ensemble"),
    )
    metric: str = setting(
        AUTO,
        "Primary metric of tables and of selection on validation data: accuracy, balanced_accuracy, macro_f1, auroc, mean_iou, "
        "exact_match, micro_f1, r2, or auto (the default of the task; balanced accuracy for imbalanced classes).",
        "Evaluation",
        "scoring",
        choices=(AUTO, "accuracy", "balanced_accuracy", "macro_f1", "auroc", "mean_iou", "exact_match", "micro_f1", "r2"),
    )
    test_batch_size: int = setting(
        256, "Test batch size; reduced for images larger than 96x96 pixels.", "Evaluation", "scoring", minimum=1
    )
    seed: int = setting(0, "Random seed.", "Training", "run", minimum=0)
    threads: int = setting(
        1, "PyTorch threads. Results are bit-identical only for the same number of threads.", "Speed", "rounding", minimum=1
    )
    checkpoint_every: str = setting(
        "60s",
        "Checkpoint interval in rounds (10) or seconds (60s).",
        "Output",
        "machine",
        pattern=r"[1-9]\d{0,9}|\d{1,10}(\.\d{1,9})?s",
        takes="a number of rounds (10) or seconds (60s)",
    )
    load: tuple[str, ...] = setting((), "Python file with custom methods; repeatable.", "Model and method", "run")
    backend: str = setting(
        "process",
        "How to run clients: process, fused (small clients together), auto (measures which is faster), flower, or debug.",
        "Speed",
        "rounding",
    )
    workers: str = setting(
        AUTO,
        "Number of processes that train clients in parallel, one thread each. auto: one per core; a single process for short runs.",
        "Speed",
        "machine",
        pattern=r"auto|[1-9]\d{0,5}",
        takes="a number of processes (2) or auto",
    )
    compile: str = setting(
        "off",
        "Compile the training step: off, on, or auto (only if it pays off).",
        "Speed",
        "rounding",
        choices=("off", "on", "auto"),
    )
    device: str = setting(
        "cpu",
        "Training device: cpu, cuda, cuda:1, mps, or auto.",
        "Speed",
        "rounding",
        pattern=r"auto|cpu|mps|meta|cuda(:\d{1,3})?",
        takes="cpu, cuda, cuda:1, mps or auto",
    )
    amp: str = setting(
        "off", "Mixed precision for training and testing: off or bfloat16.", "Speed", "training", choices=("off", "bfloat16")
    )
    layout: str = setting(
        "channels_first",
        "Memory layout of images: channels_first, or channels_last (faster for some CNNs).",
        "Speed",
        "rounding",
        choices=("channels_first", "channels_last"),
    )
    flower_cpus: float = setting(1.0, "CPUs per running client (with --backend flower).", "Speed", "rounding", minimum=0)
    flower_gpus: float = setting(0.0, "GPUs per running client (with --backend flower).", "Speed", "rounding", minimum=0)
    trust: Trust = field(default=NOTHING, repr=False, compare=False)
    """Code named by the settings that may be run. This is not a setting, and it is not written to files."""

    def __post_init__(self) -> None:
        values = [(facts, name, getattr(self, name)) for name, facts in FACTS.items()]
        problems = [text for facts, name, value in values if (text := facts.misfit(name, value))]
        if not problems:
            problems = [text for facts, name, value in values if (text := facts.problem(name, value))]
            problems += self._problems()
        if problems:
            raise SettingError(" ".join(problems))

    def _problems(self) -> Iterable[str]:
        """Yield error messages about conditions that the facts of a single setting cannot express."""
        wanted = self.clients_per_round
        if wanted is not None and not (math.isfinite(wanted) and (0 < wanted < 1 or (wanted >= 1 and wanted == int(wanted)))):
            yield f"clients_per_round must be a positive number of clients or a fraction below 1, got {wanted}."
        if self.momentum and self.optimizer != "sgd":
            yield (
                f"--momentum works only with --optimizer sgd; {self.optimizer} has its own. Remove --momentum, or use --optimizer sgd."
            )
        if self.patience and self.patience[0] not in (known := FACTS["metric"].choices):
            yield f"Unknown early_stopping metric {self.patience[0]!r}. {nearest(self.patience[0], known)}"
        try:
            schedule_factor(self.schedule, 1, max(self.rounds, 1))
        except (SettingError, ValueError) as error:
            yield str(error)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON and TOML: with lists instead of tuples, without None."""
        values = {name: getattr(self, name) for name in FACTS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "") -> Settings:
        """Build settings from the output of ``to_dict``. ``where`` names the file in error messages."""
        require_names(values, where)
        return cls(**with_tuples(values))

    def trusted(self) -> Settings:
        """Return the settings with permission to run the code that they name."""
        return dataclasses.replace(self, trust=self.trust.adding(code_in(self.load, self.model)))

    def lr_at(self, round_number: int) -> float:
        return self.lr * schedule_factor(self.schedule, round_number, self.rounds)

    @property
    def lower_lr(self) -> float:
        """The rate to suggest if training diverges: a third of the present one, with two digits."""
        return float(f"{self.lr / 3:.2g}")

    @property
    def optimizer_buffers(self) -> tuple[str, ...]:
        if self.optimizer == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("step", "exp_avg", "exp_avg_sq")

    def sampled(self, clients: int) -> int:
        """Return the number of clients in a round, out of ``clients``."""
        wanted = self.clients_per_round
        if wanted is None:
            return clients
        count = max(1, round(wanted * clients)) if wanted < 1 else int(wanted)
        if count > clients:
            raise SettingError(f"clients_per_round is {count}, but there are only {clients} clients.")
        return count

    @property
    def averaged_rounds(self) -> int:
        """Number of rounds that the reported scores are averaged over, or 0 if they are not averaged."""
        found = re.fullmatch(MEAN_LAST, self.selection)
        return int(found[1]) if found else 0

    @property
    def patience(self) -> tuple[str, int] | None:
        """Metric of early stopping and number of evaluations without improvement, or None without early stopping."""
        found = re.fullmatch(EARLY_STOPPING, self.early_stopping or "")
        return (found[1], int(found[2])) if found else None

    @property
    def needs_validation(self) -> bool:
        """True if the best round is selected on validation data."""
        return self.selection in BY_VALIDATION

    @property
    def scored_at_end(self) -> int:
        """Number of last rounds after which test data is evaluated, independently of ``evaluate_every``."""
        return max(self.evaluate_last, self.averaged_rounds)

    def needed(self, requested: int) -> int:
        """Return the number of requested clients that must reply; 7 for 0.07 of 100, although the float product exceeds 7."""
        return max(1, math.ceil(self.min_share * requested - 1e-9))


FACTS = facts_of(Settings)


def setting_names(*roles: Role) -> list[str]:
    """Return the names of all settings, or of those with the given roles."""
    return [name for name, facts in FACTS.items() if not roles or facts.role in roles]


def require_names(names: Iterable[str], where: str = "") -> None:
    """Raise an error for an unknown setting. ``where`` names the file in the message."""
    for name in names:
        if name not in FACTS:
            raise SettingError(f"{f'{where}: unknown' if where else 'Unknown'} setting {name!r}. {nearest(name, FACTS)}")


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the lists in values from JSON or TOML to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    require_names(changes)
    return dataclasses.replace(settings, **changes)


def read_change(text: str, where: str = "--set") -> tuple[str, Any]:
    """Parse ``key=value``. The value is a literal, or text if the setting is text. ``where`` names the source in errors.

    >>> read_change("clients-per-round=3"), read_change("checkpoint_every=10"), read_change("unseen=street")
    (('clients_per_round', 3), ('checkpoint_every', '10'), ('unseen', ('street',)))
    """
    key, equals, written = text.partition("=")
    name = key.strip().replace("-", "_")
    if not equals:
        raise SettingError(f"{where} must be key=value, got {text!r}.")
    require_names([name])
    try:
        value = ast.literal_eval(written.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = written
    kind = FACTS[name].type
    if kind == list[str]:
        return name, (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
    if kind is str and value is not None and not isinstance(value, str):
        return name, written
    return name, value
