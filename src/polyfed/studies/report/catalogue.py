"""List and describe methods, data sets, models, partitions, losses and recipes."""

from __future__ import annotations

import inspect
import itertools
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
from polyfed.studies.report.words import KINDS, LISTS, RECIPES
from polyfed.tasks.losses import losses
from polyfed.text import read_call, read_sum

GIVEN_BY_RUN = {
    "methods": (),
    "data": ("root",),
    "models": ("classes", "input_shape"),
    "partitions": ("dataset", "seed"),
    "losses": ("class_counts",),
}
"""Options that a run sets itself, by kind."""
SINGULAR = {"methods": "method", "data": "data set", "models": "model", "partitions": "partition", "losses": "loss"}
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Reference):\s*$")
_ARGUMENT = re.compile(r"^    (\w+)(?: \([^)]*\))?: (.*)$")


def registry_of(kind: str) -> Registry[Any]:
    known: dict[str, Registry[Any]] = dict(zip(KINDS, (methods, data_sets, models, partitions, losses), strict=True))
    if kind not in known:
        raise UnknownName(f"polyfed ls cannot list {kind!r}. {nearest(kind, LISTS)}")
    return known[kind]


def written(kind: str, name: str) -> str:
    """Return a name in its public spelling; data sets have hyphens."""
    return name.replace("_", "-") if kind == "data" else name


def listed(kind: str) -> list[dict[str, Any]]:
    """Return one row per name of a kind, with the facts of methods that have no required option."""
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
    """Return the facts of a method under their JSON names."""
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
    """Describe whether a method supports partial participation."""
    if facts.full_participation:
        return "no"
    return "state ages" if facts.client_state else "yes"


def described(
    name: str, settings: Mapping[str, Any], privacy: bool = False, needs_plan: bool = False, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a description of a recipe, method, data set, model, partition or loss.

    Args:
        name: Name or expression.
        settings: Settings of the run that provides the sharing plan and the model.
        privacy: Return what clients upload under a method instead.
        needs_plan: Raise an error if a method cannot run with these settings, instead of returning the reason.
        others: Other valid names to suggest if ``name`` is unknown.
    """
    recipe = name if name.endswith(SUFFIX) and Path(name).is_file() else same_name(name, shipped_names())
    if recipe is not None and not privacy:
        return _recipe(recipe)
    name = as_call(name)
    kind, record = _found(name, others)
    found: dict[str, Any] = {"kind": SINGULAR[kind], "name": written(kind, record.name)}
    if privacy and kind != "methods":
        raise SettingError(f"--privacy requires a method, but {name} is a {SINGULAR[kind]}. Remove --privacy, or choose a method.")
    if kind == "methods":
        return found | (_privacy if privacy else _method)(name, settings, needs_plan)
    found |= {"documentation": text_of(record.doc), "options": options_of(record.signature, record.doc, GIVEN_BY_RUN[kind])}
    return found | (_model(name, settings) if kind == "models" and not lacks_options(name) else {})


def _found(name: str, others: Iterable[str]) -> tuple[str, Recorded[Any]]:
    """Return the kind and the registry record of a name; sums are methods."""
    call = read_sum(name)[0] if "+" in name else read_call(name)
    first = call.spelled or call.name
    for kind in KINDS[:1] if "+" in name else KINDS:
        registry = registry_of(kind)
        if first in registry:
            return kind, registry.find(first)
    known = [written(kind, known) for kind in KINDS for known in registry_of(kind).names()]
    suggestion = nearest(first.lower(), [*known, *shipped_names(), *others])
    raise UnknownName(f"Unknown name {first!r}. {suggestion} polyfed ls lists all names.")


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
    method = parse(text)
    parts = []
    for part in method.parts:
        record, values = methods.find(part.name), dict(part.options)
        options = [{**each, "value": values.get(str(each["name"]))} for each in options_of(record.signature, record.doc)]
        reference = " ".join(inspect.cleandoc(record.doc).partition("\nReference:\n")[2].split())
        documentation = text_of(record.doc) + (f"\n\nReference: {reference}" if reference else "")
        parts.append({"name": part.name, "documentation": documentation, "options": options})
    found: dict[str, Any] = {"name": str(method), "text": method.full_text, "parts": parts, "facts": fact_values(method.facts)}
    try:
        experiment = Experiment(with_changes(Settings(), {**settings, "method": str(method)}).trusted())
    except PolyfedError as error:
        if needs_plan:
            raise
        return found | {"plan": None, "no_plan": str(error)}
    return found | {"on": _model_and_data(experiment), "plan": experiment.plan_table()}


def _privacy(text: str, settings: Mapping[str, Any], needs_plan: bool) -> dict[str, Any]:
    """Return what clients upload under a method and whether its guarantee covers it, by entry kind if the model fits."""
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
        "head": head or "ambiguous",
        "entries": list(kinds.values()),
    }


def text_of(doc: str) -> str:
    """Return the text of a docstring before its sections."""
    return "\n".join(itertools.takewhile(lambda line: not _SECTION.match(line), inspect.cleandoc(doc).splitlines())).strip()


def reflowed(text: str) -> str:
    """Join the lines of each paragraph, except in paragraphs with indented lines (formulas)."""
    paragraphs = [paragraph.splitlines() for paragraph in text.replace("``", "`").split("\n\n")]
    return "\n\n".join(("\n" if any(line.startswith(" ") for line in lines) else " ").join(lines) for lines in paragraphs)


def _arguments_of(doc: str) -> dict[str, str]:
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
    """Return the first paragraph of a docstring on one line, without the full stop."""
    return " ".join(text_of(doc).split("\n\n")[0].split()).rstrip(".")


def options_of(signature: inspect.Signature, doc: str, given_by_run: Sequence[str] = ()) -> list[dict[str, object]]:
    """Return the default and meaning of each option, except for options that the run sets itself."""
    meanings = _arguments_of(doc)
    return [
        {
            "name": parameter.name,
            "default": None if parameter.default is inspect.Parameter.empty else parameter.default,
            "required": parameter.default is inspect.Parameter.empty,
            "meaning": meanings.get(parameter.name, ""),
        }
        for parameter in signature.parameters.values()
        if parameter.name not in given_by_run
    ]
