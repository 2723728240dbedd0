"""Every setting of a run, in one checked value; the same names on the command line, in recipes and in Python."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from polyfed.errors import SettingError, nearest
from polyfed.text import read_call

AUTO = "auto"
INCIDENTAL = (
    "method",
    "seed",
    "root",
    "threads",
    "checkpoint_every",
    "evaluate_every",
    "evaluate_last",
    "test_batch_size",
    "metric",
    "backend",
    "workers",
    "compile",
    "device",
    "layout",
    "flower_cpus",
    "flower_gpus",
    "load",
)
"""What says where and how a run was computed, or which of several it is, not what was computed."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "weights": ("samples", "uniform"),
    "optimizer": ("sgd", "adam", "adamw"),
    "sampling": ("shuffled", "balanced"),
    "last_batch": ("merge", "drop", "keep", "error"),
    "on_nan": ("stop", "drop"),
    "selection": ("last", "mean_last(10)", "best_validation", "best_local_validation"),
    "newcomer": ("averaged", "re-estimated", "nearest", "ensemble"),
    "unseen_part": ("test", "all"),
    "task": (AUTO, "classification", "multilabel", "regression", "segmentation"),
    "metric": (AUTO, "accuracy", "balanced_accuracy", "macro_f1", "auroc", "mean_iou", "exact_match", "micro_f1", "r2"),
    "compile": ("off", "on", "auto"),
    "amp": ("off", "bfloat16"),
    "layout": ("channels_first", "channels_last"),
}
BY_VALIDATION = ("best_validation", "best_local_validation")
"""Selections that choose a round on validation data: by the models after averaging, or by those that clients have just trained."""
MOST_RUNS = 10_000
"""Seeds of a comparison, or random trials of a search."""
OPTIMIZER_BUFFERS = {
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
}


class Unset:
    """A default that a data set or a model may replace. It works as its plain value; an equal value that is given is not one."""

    def plain(self) -> Any:
        """Return the value alone."""
        raise NotImplementedError


class UnsetRate(Unset, float):
    """A learning rate that was not given."""

    def plain(self) -> float:
        """Return the value alone."""
        return float(self)


class UnsetCount(Unset, int):
    """A batch size that was not given."""

    def plain(self) -> int:
        """Return the value alone."""
        return int(self)


class UnsetName(Unset, str):
    """An optimizer that was not given."""

    def plain(self) -> str:
        """Return the value alone."""
        return str(self)


def setting(default: Any, doc: str) -> Any:
    """A field with its documentation."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    data: str = setting("digits-mini", "data set, or a folder root/<domain>/<class>/*")
    root: str | None = setting(None, "folder that holds the data set's files")
    task: str = setting(AUTO, "what is learnt: classification, multilabel, regression, segmentation, or auto (told from the data)")
    partition: str = setting("domain", "how domains are dealt to clients")
    unseen: tuple[str, ...] = setting((), "domains nobody trains on")
    unseen_part: str = setting("test", "which part of an unseen domain is tested: test or all")
    few_shot: int = setting(0, "images of the unseen domain that each client may train on")
    method: str = setting("fedavg", "method, such as: fedbn + agc(clip=1.28)")
    model: str | None = setting(None, "model by name, or module.path:function; default: the data set's own")
    head: str | None = setting(None, "module that makes the logits, where it is in doubt")
    init: str | None = setting(None, "initial weights: a safetensors or .pth file, or a run folder")
    loss: str = setting(AUTO, "task loss; auto: the usual one of the task")
    rounds: int = setting(20, "number of rounds")
    total_epochs: float | None = setting(None, "budget in passes over all data, instead of rounds")
    local_epochs: int = setting(1, "epochs of local training in a round")
    local_steps: int | None = setting(None, "steps of local training in a round, instead of epochs")
    batch_size: int = setting(UnsetCount(32), "samples in a training batch, unless the data set or the model declares another")
    sampling: str = setting(
        "shuffled", "training images of an epoch: shuffled (each once), or balanced (drawn so that a client's classes are even)"
    )
    lr: float = setting(UnsetRate(0.05), "client learning rate, unless the data set or the model declares another")
    schedule: str = setting("constant", "learning rate by round: constant, cosine, steps(at=(0.5, 0.75), factor=0.1)")
    optimizer: str = setting(
        UnsetName("sgd"), "client optimizer: sgd, adam or adamw, unless the data set or the model declares another"
    )
    momentum: float = setting(0.0, "momentum of sgd")
    weight_decay: float = setting(0.0, "weight decay")
    clients_per_round: float | None = setting(None, "clients in a round: a number, or a share below 1; default: all")
    weights: str = setting("samples", "weights of clients in every mean: samples or uniform")
    max_weight_share: float | None = setting(
        None, "largest share of the weights that one client may have in a mean; default: no bound"
    )
    max_update_norm: float | None = setting(None, "largest norm of what a client may change in a round; more is scaled down")
    drop: float = setting(0.0, "share of clients that fail to answer, simulated")
    min_share: float = setting(0.5, "share of the asked clients that must answer, else the round is repeated")
    retries: int = setting(3, "how often a round is repeated before the run stops")
    on_nan: str = setting("stop", "a client whose loss is not finite: stop the run, or drop its reply")
    last_batch: str = setting("merge", "a last batch of one sample under batch norm: merge, drop, keep or error")
    selection: str = setting(
        "last",
        "which scores count: last (the last round), mean_last(10) (the mean of the last ten rounds; the model is the last round's), "
        "best_validation (the best round on validation data, mean over source clients), or best_local_validation (their models "
        "after local training, before averaging, weighted by training size)",
    )
    evaluate_every: int = setting(
        0,
        "score test data every n rounds; 0: at the end. If validation data choose the round, they are scored every n rounds (0: every "
        "round), and test data once, at the end",
    )
    evaluate_last: int = setting(0, "also score test data after each of the last n rounds")
    evaluate_clients: int = setting(
        1000,
        "clients scored where their models differ: n, from each domain by its share and at least one, drawn by the seed; 0: all",
    )
    newcomer: str = setting("averaged", "local layers of the newcomer model: averaged, re-estimated, nearest or ensemble")
    metric: str = setting(
        AUTO,
        "metric that heads the tables and chooses rounds and settings on validation data: accuracy, balanced_accuracy, macro_f1, "
        "auroc, mean_iou, exact_match, micro_f1, r2, or auto (the task's; balanced if training labels are uneven)",
    )
    test_batch_size: int = setting(
        256, "samples in a test batch; of images beyond 96x96 pixels fewer, as many as have no more pixels than 256 of these"
    )
    seed: int = setting(0, "seed of everything random")
    threads: int = setting(1, "torch threads; results are the same to the bit only for the same number")
    checkpoint_every: str = setting("60s", "rounds between checkpoints (10), or seconds (60s)")
    load: tuple[str, ...] = setting((), "files of methods of your own")
    backend: str = setting(
        "process", "how asks reach clients: process, fused (small clients together), auto (by a measurement), flower, or debug"
    )
    workers: str = setting("1", "processes that train clients side by side, one thread each: a number, or auto (one a core)")
    compile: str = setting("off", "compile the training step: off, on, or auto (where the planned work repays it)")
    device: str = setting("cpu", "where models are trained: cpu, cuda, cuda:1, mps, or auto")
    amp: str = setting("off", "mixed precision in training and testing: off or bfloat16")
    layout: str = setting("channels_first", "how images lie in memory: channels_first, or channels_last (faster for some CNNs)")
    flower_cpus: float = setting(1.0, "CPUs for each client at work, with --backend flower")
    flower_gpus: float = setting(0.0, "GPUs for each client at work, with --backend flower")

    def __post_init__(self) -> None:
        problems = list(problems_of(self))
        if problems:
            raise SettingError(" ".join(problems))

    def lr_at(self, round_number: int) -> float:
        """The learning rate of a round."""
        return self.lr * schedule_factor(self.schedule, round_number, self.rounds)

    @property
    def optimizer_buffers(self) -> tuple[str, ...]:
        """Names of the optimizer's buffers."""
        return () if self.optimizer == "sgd" and self.momentum == 0 else OPTIMIZER_BUFFERS[self.optimizer]

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
        return averaged_rounds(self.selection)

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


def schedule_factor(text: str, round_number: int, rounds: int) -> float:
    """The factor on the learning rate in a round (1 is the first).

    >>> [schedule_factor("steps(at=(0.5, 0.75), factor=0.1)", r, 4) for r in (1, 2, 3, 4)]
    [1.0, 1.0, 0.1, 0.010000000000000002]
    """
    call = read_call(text)
    if call.name == "constant" and not call.named and not call.positional:
        return 1.0
    if call.name == "cosine" and not call.named and not call.positional:
        return 0.5 * (1 + math.cos(math.pi * (round_number - 1) / rounds))
    if call.name == "steps" and not call.positional and set(call.named) <= {"at", "factor"}:
        at, factor = call.named.get("at", (0.5, 0.75)), call.named.get("factor", 0.1)
        if isinstance(at, tuple) and isinstance(factor, int | float):
            passed = sum(round_number > share_of(float(share), rounds) for share in at)  # type: ignore[arg-type]
            return math.pow(factor, passed)
    raise SettingError(f"Cannot use the schedule {text!r}. There are: constant, cosine, steps(at=(0.5, 0.75), factor=0.1).")


def averaged_rounds(selection: str) -> int:
    """The n of ``mean_last(n)``; 0 for every other selection.

    >>> averaged_rounds("mean_last(10)"), averaged_rounds("last")
    (10, 0)
    """
    found = re.fullmatch(r"mean_last\(([1-9]\d{0,5})\)", selection)
    return int(found[1]) if found else 0


def share_of(share: float, rounds: int) -> int:
    """How many whole rounds a share of them is.

    >>> share_of(0.29, 100)
    29
    """
    return math.floor(share * rounds + 1e-9)


def problems_of(settings: Settings) -> Iterable[str]:
    """Every problem with the values, a sentence each."""
    wrong_type = [item.name for item in fields(Settings) if not _fits(getattr(settings, item.name), _hints()[item.name])]
    for name in wrong_type:
        yield f"{name} takes {_hint_words(_hints()[name])}, found {getattr(settings, name)!r}."
    large = [name for name in setting_names() if name != "seed" and _too_large(getattr(settings, name))]
    for name in large:
        yield f"{name} must be a number below 2^31, found a larger one."
    strange = [name for name in setting_names() if _has_nul(getattr(settings, name))]
    for name in strange:
        yield f"{name} must not hold the character NUL."
    if wrong_type or large or strange:
        return
    for name, known in CHOICES.items():
        value = getattr(settings, name)
        if value not in known and not (name == "selection" and averaged_rounds(value)):
            yield f"{name} cannot be {value!r}. {nearest(value, known)}"
    for name in ("rounds", "local_epochs", "batch_size", "test_batch_size", "threads"):
        if getattr(settings, name) < 1:
            yield f"{name} must be at least 1, found {getattr(settings, name)}."
    if settings.local_steps is not None and settings.local_steps < 1:
        yield f"local_steps must be at least 1, found {settings.local_steps}."
    for name in (
        "lr",
        "momentum",
        "weight_decay",
        "few_shot",
        "evaluate_every",
        "evaluate_last",
        "evaluate_clients",
        "retries",
        "seed",
        "flower_cpus",
        "flower_gpus",
    ):
        if not math.isfinite(getattr(settings, name)):
            yield f"{name} must be a finite number, found {getattr(settings, name)}."
        elif getattr(settings, name) < 0:
            yield f"{name} must not be negative, found {getattr(settings, name)}."
    for name in ("drop", "min_share"):
        if not 0 <= getattr(settings, name) <= 1:
            yield f"{name} must lie between 0 and 1, found {getattr(settings, name)}."
    if settings.max_weight_share is not None and not 0 < settings.max_weight_share <= 1:
        yield f"max_weight_share must be above 0 and at most 1, found {settings.max_weight_share}."
    if settings.max_update_norm is not None and not 0 < settings.max_update_norm < math.inf:
        yield f"max_update_norm must be positive and finite, found {settings.max_update_norm}."
    wanted = settings.clients_per_round
    if wanted is not None and not (math.isfinite(wanted) and (0 < wanted < 1 or (wanted >= 1 and wanted == int(wanted)))):
        yield f"clients_per_round must be a positive number of clients or a share below 1, found {wanted}."
    if settings.total_epochs is not None and not 0 < settings.total_epochs < math.inf:
        yield f"total_epochs must be positive and finite, found {settings.total_epochs}."
    if settings.momentum and settings.optimizer != "sgd":
        yield f"momentum is for sgd: {settings.optimizer} has its own. Use --optimizer sgd, or leave momentum out."
    if not re.fullmatch(r"auto|[1-9]\d{0,5}", settings.workers):
        yield f"workers takes a number of processes (2) or auto, found {settings.workers!r}."
    if not re.fullmatch(r"auto|cpu|mps|meta|cuda(:\d{1,3})?", settings.device):
        yield f"device takes cpu, cuda, cuda:1, mps or auto, found {settings.device!r}."
    if not re.fullmatch(r"[1-9]\d{0,9}|\d{1,10}(\.\d{1,9})?s", settings.checkpoint_every):
        yield f"checkpoint_every takes rounds (10) or seconds (60s), found {settings.checkpoint_every!r}."
    try:
        schedule_factor(settings.schedule, 1, max(settings.rounds, 1))
    except (SettingError, ValueError) as error:
        yield str(error)


def _too_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**31


def _has_nul(value: Any) -> bool:
    return any("\0" in text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str))


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _hint_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", type(None): "nothing"}
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(words.get(option, "a list of names") for option in options)


def require_count(name: str, count: int) -> None:
    """Refuse a number of runs that is none, or that no machine could hold."""
    if count < 1:
        raise SettingError(f"{name} must be at least 1, found {count if count > -MOST_RUNS else 'much less'}.")
    if count > MOST_RUNS:
        raise SettingError(f"{name} must be at most {MOST_RUNS}, found more.")


def setting_names() -> list[str]:
    """All names of settings."""
    return [item.name for item in fields(Settings)]


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some changed; an unknown name says the nearest one."""
    for name in changes:
        if name not in setting_names():
            raise SettingError(f"There is no setting {name!r}. {nearest(name, setting_names())}")
    return dataclasses.replace(settings, **changes)
