"""What a recipe's title and note claim of the model is what its model is: every recipe's model is built, after the method's surgery."""

from __future__ import annotations

import re

import torch
from torch import nn

from helpers.model_claims import OF_LABELS, Check, federation_for, has_group_norm, keeps_batch_norm, standardises
from polyfed.core.method import parse
from polyfed.data.registry import data_sets
from polyfed.models import models
from polyfed.runs.assemble import prepared_model
from polyfed.settings import Settings
from polyfed.studies.compare.recipes import read, shipped_names
from polyfed.studies.compare.recipes.checks import record_of

OF_NOTES: dict[str, Check] = {
    r"with group norm": has_group_norm,
    r"[Bb]atch norm stays": keeps_batch_norm,
    r"standardises the weights": standardises,
}


def claims(title: str, note: str) -> dict[str, Check]:
    of_label = {words: check for words, check in OF_LABELS.items() if re.search(words, title.split(" on ")[0])}
    return of_label | {words: check for words, check in OF_NOTES.items() if re.search(words, note)}


def model_of(name: str) -> nn.Module:
    recipe = read(name)
    settings = Settings.from_dict(recipe.values, name)
    record = record_of(settings.data)
    assert record is not None
    federation = federation_for(settings)
    method = parse(settings.method)
    model = settings.model or data_sets.find(record.name).extra.get("declaration", federation).default_model
    return prepared_model(settings, method, federation, model, None)


def test_the_claims_can_fail() -> None:
    plain = models.build('hfedf_cnn(norm="batch")', classes=7, input_shape=(3, 32, 32))
    found = claims(
        "GN+WS on PACS", "The method replaces batch norm with group norm and standardises the weights of every convolution."
    )
    assert len(found) == 4 and not any(check(plain) for check in found.values())
    only_weights = parse("fedavg + weight_standard").surgery[0](plain)  # type: ignore[call-arg, arg-type]
    assert standardises(only_weights) and keeps_batch_norm(only_weights) and not has_group_norm(only_weights)


def test_what_recipes_claim_of_their_models_is_true() -> None:
    checked = set()
    for name in shipped_names():
        recipe = read(name)
        found = claims(recipe.title, str(recipe.about.get("note", "")))
        same = (*(recipe.values.get(key) for key in ("data", "model", "method")), *found)
        if found and same not in checked:
            checked.add(same)
            torch.manual_seed(0)
            model = model_of(name)
            false = [words for words, check in found.items() if not check(model)]
            assert not false, f"{name} claims {false}, and its model is {model}"
