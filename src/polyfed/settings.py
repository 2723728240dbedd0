"""Every setting of a run, in one checked value; the same names on the command line, in recipes and in Python.

A field of ``Settings`` holds what is known about a setting: its default, doc, group in help, role, choices and bounds. ``FACTS`` has them by name.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.errors import SettingError, nearest
from polyfed.schedule import schedule_factor
from polyfed.setting_facts import Role, facts_of, setting

AUTO = "auto"
MEAN_LAST = r"mean_last\(([1-9]\d{0,5})\)"
BY_VALIDATION = ("best_validation", "best_local_validation")
"""Selections that choose a round on validation data: by the models after averaging, or by those that clients have just trained."""
MOST_RUNS = 10_000
"""Seeds of a comparison, or random trials of a search."""


class Unset:
    """A default that a data set or a model may replace. It works as its plain value; an equal value that is given is not one."""


class _UnsetRate(Unset, float): ...


class _UnsetCount(Unset, int): ...


class _UnsetName(Unset, str): ...


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    data: str = setting("digits-mini", "data set, or a folder root/<domain>/<class>/*", group="Data", role="task")
    root: str | None = setting(None, "folder that holds the data set's files", group="Data", role="machine")
    task: str = setting(
        AUTO,
        "what is learnt: classification, multilabel, regression, segmentation, or auto (told from the data)",
        group="Model and method",
        role="task",
        choices=(AUTO, "classification", "multilabel", "regression", "segmentation"),
    )
    partition: str = setting("domain", "how domains are dealt to clients", group="Data", role="partition")
    unseen: tuple[str, ...] = setting((), "domains nobody trains on", group="Data", role="partition")
    unseen_part: str = setting(
        "test", "which part of an unseen domain is tested: test or all", group="Data", role="partition", choices=("test", "all")
    )
    few_shot: int = setting(
        0, "images of the unseen domain that each client may train on", group="Data", role="partition", minimum=0
    )
    method: str = setting("fedavg", "method, such as: fedbn + agc(clip=1.28)", group="Model and method", role="run")
    model: str | None = setting(
        None, "model by name, or module.path:function; default: the data set's own", group="Model and method", role="task"
    )
    head: str | None = setting(None, "module that makes the logits, where it is in doubt", group="Model and method", role="task")
    init: str | None = setting(
        None, "initial weights: a safetensors or .pth file, or a run folder", group="Model and method", role="task"
    )
    loss: str = setting(AUTO, "task loss; auto: the usual one of the task", group="Model and method", role="training")
    rounds: int = setting(20, "number of rounds", group="Training", role="budget", minimum=1)
    total_epochs: float | None = setting(
        None, "budget in passes over all data, instead of rounds", group="Training", role="budget", above=0
    )
    local_epochs: int = setting(1, "epochs of local training in a round", group="Training", role="training", minimum=1)
    local_steps: int | None = setting(
        None, "steps of local training in a round, instead of epochs", group="Training", role="training", minimum=1
    )
    batch_size: int = setting(
        _UnsetCount(32),
        "samples in a training batch, unless the data set or the model declares another",
        group="Training",
        role="training",
        minimum=1,
    )
    sampling: str = setting(
        "shuffled",
        "training images of an epoch: shuffled (each once), or balanced (drawn so that a client's classes are even)",
        group="Training",
        role="training",
        choices=("shuffled", "balanced"),
    )
    lr: float = setting(
        _UnsetRate(0.05),
        "client learning rate, unless the data set or the model declares another",
        group="Training",
        role="training",
        minimum=0,
    )
    schedule: str = setting(
        "constant", "learning rate by round: constant, cosine, steps(at=(0.5, 0.75), factor=0.1)", group="Training", role="training"
    )
    optimizer: str = setting(
        _UnsetName("sgd"),
        "client optimizer: sgd, adam or adamw, unless the data set or the model declares another",
        group="Training",
        role="training",
        choices=("sgd", "adam", "adamw"),
    )
    momentum: float = setting(0.0, "momentum of sgd", group="Training", role="training", minimum=0)
    weight_decay: float = setting(0.0, "weight decay", group="Training", role="training", minimum=0)
    clients_per_round: float | None = setting(
        None, "clients in a round: a number, or a share below 1; default: all", group="Clients", role="budget"
    )
    weights: str = setting(
        "samples",
        "weights of clients in every mean: samples or uniform",
        group="Clients",
        role="training",
        choices=("samples", "uniform"),
    )
    max_weight_share: float | None = setting(
        None,
        "largest share of the weights that one client may have in a mean; default: no bound",
        group="Clients",
        role="training",
        maximum=1,
        above=0,
    )
    max_update_norm: float | None = setting(
        None, "largest norm of what a client may change in a round; more is scaled down", group="Clients", role="training", above=0
    )
    drop: float = setting(
        0.0, "share of clients that fail to answer, simulated", group="Clients", role="training", minimum=0, maximum=1
    )
    min_share: float = setting(
        0.5,
        "share of the asked clients that must answer, else the round is repeated",
        group="Clients",
        role="training",
        minimum=0,
        maximum=1,
    )
    retries: int = setting(3, "how often a round is repeated before the run stops", group="Clients", role="training", minimum=0)
    on_nan: str = setting(
        "stop",
        "a client whose loss is not finite: stop the run, or drop its reply",
        group="Clients",
        role="training",
        choices=("stop", "drop"),
    )
    last_batch: str = setting(
        "merge",
        "a last batch of one sample under batch norm: merge, drop, keep or error",
        group="Training",
        role="training",
        choices=("merge", "drop", "keep", "error"),
    )
    selection: str = setting(
        "last",
        "which scores count: last (the last round), mean_last(10) (the mean of the last ten rounds; the model is the last round's), "
        "best_validation (the best round on validation data, mean over source clients), or best_local_validation (their models "
        "after local training, before averaging, weighted by training size)",
        group="Evaluation",
        role="training",
        choices=("last", "mean_last(10)", "best_validation", "best_local_validation"),
        pattern=MEAN_LAST,
    )
    evaluate_every: int = setting(
        0,
        "score test data every n rounds; 0: at the end. If validation data choose the round, they are scored every n rounds (0: every "
        "round), and test data once, at the end",
        group="Evaluation",
        role="scoring",
        minimum=0,
    )
    evaluate_last: int = setting(
        0, "also score test data after each of the last n rounds", group="Evaluation", role="scoring", minimum=0
    )
    evaluate_clients: int = setting(
        1000,
        "clients scored where their models differ: n, from each domain by its share and at least one, drawn by the seed; 0: all",
        group="Evaluation",
        role="task",
        minimum=0,
    )
    newcomer: str = setting(
        "averaged",
        "local layers of the newcomer model: averaged, re-estimated, nearest or ensemble",
        group="Evaluation",
        role="task",
        choices=("averaged", "re-estimated", "nearest", "ensemble"),
    )
    metric: str = setting(
        AUTO,
        "metric that heads the tables and chooses rounds and settings on validation data: accuracy, balanced_accuracy, macro_f1, "
        "auroc, mean_iou, exact_match, micro_f1, r2, or auto (the task's; balanced if training labels are uneven)",
        group="Evaluation",
        role="scoring",
        choices=(AUTO, "accuracy", "balanced_accuracy", "macro_f1", "auroc", "mean_iou", "exact_match", "micro_f1", "r2"),
    )
    test_batch_size: int = setting(
        256,
        "samples in a test batch; of images beyond 96x96 pixels fewer, as many as have no more pixels than 256 of these",
        group="Evaluation",
        role="scoring",
        minimum=1,
    )
    seed: int = setting(0, "seed of everything random", group="Training", role="run", minimum=0)
    threads: int = setting(
        1, "torch threads; results are the same to the bit only for the same number", group="Speed", role="rounding", minimum=1
    )
    checkpoint_every: str = setting(
        "60s",
        "rounds between checkpoints (10), or seconds (60s)",
        group="Output",
        role="machine",
        pattern=r"[1-9]\d{0,9}|\d{1,10}(\.\d{1,9})?s",
        takes="rounds (10) or seconds (60s)",
    )
    load: tuple[str, ...] = setting((), "files of methods of your own", group="Model and method", role="run")
    backend: str = setting(
        "process",
        "how asks reach clients: process, fused (small clients together), auto (by a measurement), flower, or debug",
        group="Speed",
        role="rounding",
    )
    workers: str = setting(
        "1",
        "processes that train clients side by side, one thread each: a number, or auto (one a core)",
        group="Speed",
        role="machine",
        pattern=r"auto|[1-9]\d{0,5}",
        takes="a number of processes (2) or auto",
    )
    compile: str = setting(
        "off",
        "compile the training step: off, on, or auto (where the planned work repays it)",
        group="Speed",
        role="rounding",
        choices=("off", "on", "auto"),
    )
    device: str = setting(
        "cpu",
        "where models are trained: cpu, cuda, cuda:1, mps, or auto",
        group="Speed",
        role="rounding",
        pattern=r"auto|cpu|mps|meta|cuda(:\d{1,3})?",
        takes="cpu, cuda, cuda:1, mps or auto",
    )
    amp: str = setting(
        "off",
        "mixed precision in training and testing: off or bfloat16",
        group="Speed",
        role="training",
        choices=("off", "bfloat16"),
    )
    layout: str = setting(
        "channels_first",
        "how images lie in memory: channels_first, or channels_last (faster for some CNNs)",
        group="Speed",
        role="rounding",
        choices=("channels_first", "channels_last"),
    )
    flower_cpus: float = setting(
        1.0, "CPUs for each client at work, with --backend flower", group="Speed", role="rounding", minimum=0
    )
    flower_gpus: float = setting(
        0.0, "GPUs for each client at work, with --backend flower", group="Speed", role="rounding", minimum=0
    )

    def __post_init__(self) -> None:
        values = [(facts, name, getattr(self, name)) for name, facts in FACTS.items()]
        problems = [text for facts, name, value in values if (text := facts.misfit(name, value))]
        if not problems:
            problems = [text for facts, name, value in values if (text := facts.problem(name, value))]
            problems += self._problems()
        if problems:
            raise SettingError(" ".join(problems))

    def _problems(self) -> Iterable[str]:
        """What is wrong with a value that its facts cannot say, or with several together."""
        wanted = self.clients_per_round
        if wanted is not None and not (math.isfinite(wanted) and (0 < wanted < 1 or (wanted >= 1 and wanted == int(wanted)))):
            yield f"clients_per_round must be a positive number of clients or a share below 1, found {wanted}."
        if self.momentum and self.optimizer != "sgd":
            yield f"momentum is for sgd: {self.optimizer} has its own. Use --optimizer sgd, or leave momentum out."
        try:
            schedule_factor(self.schedule, 1, max(self.rounds, 1))
        except (SettingError, ValueError) as error:
            yield str(error)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON and TOML write them: lists for tuples, without those that are None."""
        values = {name: getattr(self, name) for name in FACTS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "") -> Settings:
        """Read what ``to_dict`` wrote; ``where`` names the file in an error."""
        require_names(values, where)
        return cls(**with_tuples(values))

    def lr_at(self, round_number: int) -> float:
        return self.lr * schedule_factor(self.schedule, round_number, self.rounds)

    @property
    def optimizer_buffers(self) -> tuple[str, ...]:
        if self.optimizer == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("step", "exp_avg", "exp_avg_sq")

    def sampled(self, clients: int) -> int:
        """How many of ``clients`` clients take part in a round."""
        wanted = self.clients_per_round
        if wanted is None:
            return clients
        count = max(1, round(wanted * clients)) if wanted < 1 else int(wanted)
        if count > clients:
            raise SettingError(f"clients_per_round is {count}, but there are only {clients} clients.")
        return count

    @property
    def averaged_rounds(self) -> int:
        """How many of the last rounds the reported scores are the mean of; 0 if they are those of one round."""
        found = re.fullmatch(MEAN_LAST, self.selection)
        return int(found[1]) if found else 0

    @property
    def needs_validation(self) -> bool:
        """Whether validation data choose the round."""
        return self.selection in BY_VALIDATION

    @property
    def scored_at_end(self) -> int:
        """After how many of the last rounds test data are scored, whatever ``evaluate_every`` is."""
        return max(self.evaluate_last, self.averaged_rounds)

    def needed(self, asked: int) -> int:
        """How many of the asked clients must answer; 0.07 of 100 are 7, not the 8 that the product of floats rounds up to."""
        return max(1, math.ceil(self.min_share * asked - 1e-9))


FACTS = facts_of(Settings)


def require_count(name: str, count: int) -> None:
    """Refuse a number of runs that is none, or that no machine could hold."""
    if count < 1:
        raise SettingError(f"{name} must be at least 1, found {count if count > -MOST_RUNS else 'much less'}.")
    if count > MOST_RUNS:
        raise SettingError(f"{name} must be at most {MOST_RUNS}, found more.")


def setting_names(*roles: Role) -> list[str]:
    """Return the names of settings, of some roles or of all."""
    return [name for name, facts in FACTS.items() if not roles or facts.role in roles]


def require_names(names: Iterable[str], where: str = "") -> None:
    """Refuse names that no setting has; ``where`` says where they were found."""
    for name in names:
        if name not in FACTS:
            raise SettingError(f"{f'{where}: there' if where else 'There'} is no setting {name!r}. {nearest(name, FACTS)}")


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of JSON or TOML as ``Settings`` takes them: tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    require_names(changes)
    return dataclasses.replace(settings, **changes)


def read_change(text: str, where: str = "--set takes") -> tuple[str, Any]:
    """Read ``key=value``; the value is a literal, or text if the setting is text. ``where`` starts the error.

    >>> read_change("clients-per-round=3"), read_change("checkpoint_every=10"), read_change("unseen=street")
    (('clients_per_round', 3), ('checkpoint_every', '10'), ('unseen', ('street',)))
    """
    key, equals, written = text.partition("=")
    name = key.strip().replace("-", "_")
    if not equals:
        raise SettingError(f"{where} key=value, found {text!r}.")
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
