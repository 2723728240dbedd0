"""The groups of options in help: data, model and method, training, clients, evaluation, speed, output."""

from __future__ import annotations

from collections.abc import Mapping

from polyfed.settings import FACTS

GROUPS = ("Data", "Model and method", "Training", "Clients", "Evaluation", "Speed", "Output")
"""In the order of help. A setting has its group in its facts; a command's own options have one by ``OWN``, or are under "Output"."""
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
    return FACTS[name].group if name in FACTS else OWN.get(name, "Output")
