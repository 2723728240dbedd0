"""What there is to choose from: methods, data sets, models, partitions, losses and recipes, as rows of lists and in full."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.entries import entries_of, find_head
from polyfed.core.method import Facts, methods, parse
from polyfed.core.privacy import departures
from polyfed.data.registry import data_sets, partitions
from polyfed.errors import PolyfedError, SettingError, UnknownName, nearest, same_name
from polyfed.models import models
from polyfed.models.model_text import as_call, lacks_options
from polyfed.models.weights import weights_skipped
from polyfed.registry import Recorded, Registry
from polyfed.runs.assemble import build_federation, build_model
from polyfed.runs.experiment import Experiment
from polyfed.runs.model_checks import check_output
from polyfed.settings import Settings, with_changes
from polyfed.studies.compare.recipes import SUFFIX, read, shipped_names
from polyfed.studies.report.kinds import KINDS, LISTS, RECIPES
from polyfed.tasks.losses import losses
from polyfed.text import read_call, read_sum

GIVEN_BY_RUN = {
    "methods": (),
    "data": ("root",),
    "models": ("classes", "input_shape"),
    "partitions": ("dataset", "seed"),
    "losses": ("class_counts",),
}
"""Options that a run gives, by kind."""
SINGULAR = {"methods": "method", "data": "data set", "models": "model", "partitions": "partition", "losses": "loss"}
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Reference):\s*$")
_ARGUMENT = re.compile(r"^    (\w+)(?: \([^)]*\))?: (.*)$")


def registry_of(kind: str) -> Registry[Any]:
    """Return the registry of a kind of thing."""
    known: dict[str, Registry[Any]] = dict(zip(KINDS, (methods, data_sets, models, partitions, losses), strict=True))
    if kind not in known:
        raise UnknownName(f"There is no list of {kind!r}. {nearest(kind, LISTS)}")
    return known[kind]


def written(kind: str, name: str) -> str:
    """Return a name as users write it; data sets have hyphens."""
    return name.replace("_", "-") if kind == "data" else name


def listed(kind: str) -> list[dict[str, Any]]:
    """Return a line for each thing of a kind; a method with its facts, unless it has an option without a default."""
    if kind == RECIPES:
        return [{"name": name, "summary": read(name).title} for name in shipped_names()]
    found = []
    for record in map(registry_of(kind).find, registry_of(kind).names()):
        row: dict[str, Any] = {"name": written(kind, record.name), "summary": first_sentence(record.doc)}
        options = record.signature.parameters.values()
        if kind == "methods" and all(option.default is not inspect.Parameter.empty for option in options):
            row |= fact_values(record.extra["build_with"]().facts)
        found.append(row)
    return found


def fact_values(facts: Facts) -> dict[str, Any]:
    """Return facts under names for JSON."""
    return {
        "needs_batch_norm": facts.batch_norm,
        "keeps_client_state": facts.client_state,
        "smallest_batch": facts.smallest_batch,
        "sampled_clients": sampled_words(facts),
        "data_derived_uploads": facts.data_derived_uploads or "model entries only",
        "granularity": facts.granularity or "none",
        "messages": facts.messages,
        "extra_work": facts.extra_work,
        **({"protects": facts.protects, "noise_at": facts.noise_at, "noise_from": facts.noise_from} if facts.protects else {}),
    }


def sampled_words(facts: Facts) -> str:
    """Return whether a method works when only some clients take part in a round."""
    if facts.full_participation:
        return "no"
    return "state ages" if facts.client_state else "yes"


def described(
    name: str, settings: Mapping[str, Any], privacy: bool = False, needs_plan: bool = False, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return all about one thing, by its name or text.

    Args:
        name: Of a recipe, method, data set, model, partition or loss.
        settings: Of the run whose plan and model are shown.
        privacy: Return what leaves a client under a method instead.
        needs_plan: Refuse a method that cannot be run with these settings, instead of saying why there is no plan.
        others: Names of other things, for the error about an unknown name.
    """
    recipe = name if name.endswith(SUFFIX) and Path(name).is_file() else same_name(name, shipped_names())
    if recipe is not None and not privacy:
        return _recipe(recipe)
    name = as_call(name)
    kind, record = _found(name, others)
    found: dict[str, Any] = {"kind": SINGULAR[kind], "name": written(kind, record.name)}
    if privacy and kind != "methods":
        raise SettingError(f"--privacy is about methods, and {name} is a {SINGULAR[kind]}. Leave it out, or name a method.")
    if kind == "methods":
        return found | (_privacy if privacy else _method)(name, settings, needs_plan)
    found |= {"documentation": text_of(record.doc), "options": options_of(record.signature, record.doc, GIVEN_BY_RUN[kind])}
    return found | (_model(name, settings) if kind == "models" and not lacks_options(name) else {})


def _found(name: str, others: Iterable[str]) -> tuple[str, Recorded[Any]]:
    """Return the kind of thing a name stands for; a sum is a method."""
    call = read_sum(name)[0] if "+" in name else read_call(name)
    first = call.spelled or call.name
    for kind in KINDS[:1] if "+" in name else KINDS:
        registry = registry_of(kind)
        if first in registry:
            return kind, registry.find(first)
    known = [written(kind, known) for kind in KINDS for known in registry_of(kind).names()]
    raise UnknownName(f"Nothing is called {first!r}. {nearest(first.lower(), [*known, *shipped_names(), *others])} See polyfed ls.")


def _recipe(name: str) -> dict[str, Any]:
    recipe = read(name)
    return {
        "kind": "recipe",
        "name": name,
        "about": dict(recipe.about),
        "settings": dict(recipe.values),
        "methods": {text: dict(own) for text, own in recipe.methods.items()},
        "command": recipe.command,
    }


def _method(text: str, settings: Mapping[str, Any], needs_plan: bool) -> dict[str, Any]:
    """Return the parts of a method, its facts, and the plan of what travels on a model."""
    method = parse(text)
    parts = []
    for part in method.parts:
        record = methods.find(part.name)
        now = dict(part.options)
        options = [{**each, "value": now.get(str(each["name"]))} for each in options_of(record.signature, record.doc)]
        parts.append({"name": part.name, "documentation": _with_reference(record.doc), "options": options})
    found: dict[str, Any] = {"name": str(method), "text": method.full_text, "parts": parts, "facts": fact_values(method.facts)}
    try:
        experiment = Experiment(with_changes(Settings(), {**settings, "method": str(method)}).trusted())
    except PolyfedError as error:
        if needs_plan:
            raise
        return found | {"plan": None, "no_plan": str(error)}
    return found | {"on": _model_and_data(experiment), "plan": experiment.plan_table()}


def _privacy(text: str, settings: Mapping[str, Any], needs_plan: bool) -> dict[str, Any]:
    """Return what leaves a client under a method, and whether its guarantee covers it; by kinds of entries if a model fits."""
    method = parse(text)
    run = with_changes(Settings(), {**settings, "method": str(method)}).trusted()
    facts = method.facts
    found: dict[str, Any] = {"name": str(method), "protects": facts.protects or "nobody"}
    if facts.protects:
        found |= {"noise_at": facts.noise_at, "noise_from": facts.noise_from, "epsilon": facts.epsilon, "delta": facts.delta}
    try:
        experiment = Experiment(run)
    except PolyfedError as error:
        if needs_plan:
            raise
        return found | {"leaves": [row.as_json() for row in departures(method, run)], "no_plan": str(error)}
    leaves = [row.as_json() for row in departures(method, run, experiment.bench.plan)]
    return found | {"on": _model_and_data(experiment), "leaves": leaves}


def _model_and_data(experiment: Experiment) -> str:
    return f"{type(experiment.bench.model).__name__}, {experiment.federation.name}"


def _model(text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many parameters a model has, and its entries by kind."""
    run = with_changes(Settings(), {**settings, "model": text}).trusted()
    federation = build_federation(settings["data"], run)
    with weights_skipped():
        built = build_model(text, federation, 0, run.trust)
    check_output(built, federation)
    head, _ = find_head(built, federation.sample_input(), None)
    kinds: dict[str, dict[str, Any]] = {}
    for entry in entries_of(built, head).values():
        row = kinds.setdefault(entry.kind, {"kind": entry.kind, "entries": 0, "bytes": 0})
        row["entries"] += 1
        row["bytes"] += entry.size
    shape = "x".join(map(str, federation.sample_input().shape[1:]))
    return {
        "parameters": sum(p.numel() for p in built.parameters()),
        "on": f"{federation.name}: inputs {shape}, {len(federation.classes)} classes",
        "head": head or "in doubt",
        "entries": list(kinds.values()),
    }


def _with_reference(doc: str) -> str:
    reference = inspect.cleandoc(doc).partition("\nReference:\n")[2].split()
    return "\n\n".join([text_of(doc), *([f"Reference: {' '.join(reference)}"] if reference else [])])


def text_of(doc: str) -> str:
    """Return the text of a docstring before its sections."""
    shown: list[str] = []
    for line in inspect.cleandoc(doc).splitlines():
        if _SECTION.match(line):
            break
        shown.append(line)
    return "\n".join(shown).strip()


def reflowed(text: str) -> str:
    """Return the text with one line for each paragraph, so that a terminal can break it; indented lines (formulas) stay."""
    paragraphs = [paragraph.splitlines() for paragraph in text.replace("``", "`").split("\n\n")]
    return "\n\n".join(("\n" if any(line.startswith(" ") for line in lines) else " ").join(lines) for lines in paragraphs)


def arguments_of(doc: str) -> dict[str, str]:
    """Return what a docstring says about each argument, on one line."""
    found: dict[str, list[str]] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(doc).splitlines():
        section = _SECTION.match(line)
        if section:
            inside = section.group(1) == "Args"
        elif inside and (match := _ARGUMENT.match(line)):
            name = match.group(1)
            found[name] = [match.group(2)]
        elif inside and name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def first_sentence(doc: str) -> str:
    """Return the first paragraph on one line, without the full stop."""
    return " ".join(text_of(doc).split("\n\n")[0].split()).rstrip(".")


def options_of(signature: inspect.Signature, doc: str, given_by_run: Sequence[str] = ()) -> list[dict[str, object]]:
    """Return each option with its default and what it means, without those that the run gives."""
    said = arguments_of(doc)
    return [
        {
            "name": parameter.name,
            "default": None if parameter.default is inspect.Parameter.empty else parameter.default,
            "required": parameter.default is inspect.Parameter.empty,
            "meaning": said.get(parameter.name, ""),
        }
        for parameter in signature.parameters.values()
        if parameter.name not in given_by_run
    ]
