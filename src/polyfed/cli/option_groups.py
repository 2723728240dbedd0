"""The groups of options in help: data, model and method, training, clients, evaluation, speed, output."""

from __future__ import annotations

from collections.abc import Mapping

OUTPUT = "Output"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Data": ("data", "root", "partition", "unseen", "unseen_part", "few_shot"),
    "Model and method": ("method", "model", "head", "init", "loss", "load", "task"),
    "Training": (
        "rounds",
        "total_epochs",
        "local_epochs",
        "local_steps",
        "batch_size",
        "sampling",
        "lr",
        "schedule",
        "optimizer",
        "momentum",
        "weight_decay",
        "last_batch",
        "seed",
    ),
    "Clients": (
        "clients_per_round",
        "weights",
        "max_weight_share",
        "max_update_norm",
        "drop",
        "min_share",
        "retries",
        "on_nan",
    ),
    "Evaluation": ("selection", "evaluate_every", "evaluate_last", "evaluate_clients", "newcomer", "metric", "test_batch_size"),
    "Speed": ("backend", "workers", "threads", "compile", "device", "amp", "layout", "flower_cpus", "flower_gpus"),
    OUTPUT: ("checkpoint_every",),
}
"""Every setting of a run, in one group each. A command's own options are in a group by ``OWN``, or under "Output"."""
OWN: Mapping[str, str] = {
    "methods": "Model and method",
    "recipe": "Model and method",
    "changes": "Model and method",
    "trust": "Model and method",
    "protocol": "Evaluation",
    "seeds": "Training",
    "set_grid": "Training",
    "trials": "Training",
    "sampler": "Training",
    "halving": "Training",
    "hold_out": "Evaluation",
}
"""The group of options that are a command's own."""


def group_of(name: str) -> str:
    """The group of an option, by the name of its parameter.

    >>> group_of("lr"), group_of("as_json")
    ('Training', 'Output')
    """
    return next((group for group, names in GROUPS.items() if name in names), OWN.get(name, OUTPUT))
