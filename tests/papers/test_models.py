"""Every method of the experiments can be built on its model, and the model has the properties that the row's name claims."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from helpers.model_claims import OF_LABELS, Norms, federation_for, has
from polyfed.core.method import parse
from polyfed.papers.files import FORMS, item_names, read_item
from polyfed.papers.grid import Form, cells_of, sources_of
from polyfed.runs.assemble import build_bench, prepared_model
from polyfed.settings import Settings

LIGHT = ("resnet20", "lenet")
"""Networks that are fast to build; make test-slow builds the others."""
Built = tuple[str, str]


def builds() -> dict[Built, tuple[Settings, set[str]]]:
    """Return each pair of method and model once, with the names of its rows."""
    found: dict[Built, tuple[Settings, set[str]]] = {}
    for name in item_names():
        for form in map(Form, FORMS):
            for cell in cells_of(read_item(name), form):
                for source in [] if cell.why_not else sources_of(cell, form):
                    if source.settings is not None:
                        model = (source.settings.model or "").replace("(pretrained=True)", "")
                        settings = dataclasses.replace(source.settings, model=model, unseen=source.settings.unseen[:1])
                        key = (model, settings.method)
                        found.setdefault(key, (settings, set()))[1].add(source.row.name)
    return found


BUILDS = builds()


def label(key: Built) -> str:
    return f"{key[0]}-{key[1]}"


def marked() -> list[object]:
    light = [key for key in BUILDS if key[0].split("(")[0] in LIGHT]
    return [pytest.param(key, id=label(key), marks=[] if key in light else pytest.mark.slow) for key in BUILDS]


@pytest.mark.parametrize("key", marked())
def test_a_method_builds_on_its_model_and_is_what_its_row_says(key: Built) -> None:
    torch.manual_seed(0)
    settings, rows = BUILDS[key]
    federation = federation_for(settings)
    method = parse(settings.method)
    population = federation if method.population is None else method.population(federation)
    model = prepared_model(settings, method, population, None, None)
    build_bench(settings, method, population, model)
    for row in rows:
        plain = re.sub(r"w/o BN", "", row)
        false = [words for words, check in OF_LABELS.items() if re.search(words, plain) and "FixBN" not in row and not check(model)]
        assert not false, f"{row} ({settings.method}) claims {false}"
        assert "w/o BN" not in row or not has(model, *Norms)


def test_many_methods_are_built() -> None:
    assert len(BUILDS) > 60
