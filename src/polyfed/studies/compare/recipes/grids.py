"""Grids: near-equal recipes that are shipped as one file, each under a name of its own.

``names`` says how the recipes of a file are called, and ``[grid.AXIS]`` holds what they differ in: settings, and words for the places in
braces of ``names``, ``title`` and ``note``. The key of a value is the word for its axis. Every combination of the axes is a recipe.

    names = "pacs/30-rounds-{target}-{method}"
    title = "{label} on PACS without {target}, 30 rounds"

    [grid.target]
    photo = { unseen = ["photo"] }

    [grid.method]
    fedavg = { label = "FedAvg", method = "fedavg" }
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.settings import setting_names

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".toml"
GRID = "grid"


@functools.cache
def shipped_texts() -> Mapping[str, str]:
    """Every shipped recipe by its name, as TOML."""
    texts: dict[str, str] = {}
    for file in sorted(SHIPPED.rglob(f"*{SUFFIX}")):
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
        name = file.relative_to(SHIPPED).with_suffix("").as_posix()
        texts |= recipes_in(document) if GRID in document else {name: text}
    return texts


def recipes_in(document: Mapping[str, Any]) -> dict[str, str]:
    """The recipes of a grid by their names, as TOML."""
    axes = document[GRID]
    texts = {}
    for chosen in itertools.product(*(axis.items() for axis in axes.values())):
        values = {name: value for _, own in chosen for name, value in own.items()}
        words = {axis: key for axis, (key, _) in zip(axes, chosen, strict=True)}
        words |= {name: str(value) for name, value in values.items() if name not in setting_names()}
        name = filled(document["names"], words)
        sentences = {key: filled(words.get(key, document[key]), words) for key in ("title", "note")}
        settings = document["settings"] | {key: value for key, value in values.items() if key in setting_names()}
        texts[name] = f"# polyfed run --recipe {name} --root DATA\n" + tomli_w.dumps({**sentences, "settings": settings})
    return texts


def filled(text: str, words: Mapping[str, str]) -> str:
    """A text with words in the places of their names; a place that has no word stays empty.

    >>> filled("{label} on PACS. {more}", {"label": "FedAvg"})
    'FedAvg on PACS.'
    """
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], ""), text).strip()
