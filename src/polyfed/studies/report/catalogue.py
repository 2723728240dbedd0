"""What there is to choose from: methods, data sets, models, partitions, losses and recipes, as rows of tables."""

from __future__ import annotations

import inspect
from typing import Any

from polyfed.core.losses import losses
from polyfed.core.method import Facts, methods
from polyfed.core.registry import Recorded, Registry
from polyfed.data.registry import data_sets, partitions
from polyfed.errors import UnknownName, nearest
from polyfed.models import models
from polyfed.studies.compare.recipes import read, shipped_names
from polyfed.studies.report.docstrings import first_sentence
from polyfed.studies.report.kinds import KINDS, LISTS, RECIPES


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind of thing."""
    known: dict[str, Registry[Any]] = dict(zip(KINDS, (methods, data_sets, models, partitions, losses), strict=True))
    if kind not in known:
        raise UnknownName(f"There is no list of {kind!r}. {nearest(kind, LISTS)}")
    return known[kind]


def written(kind: str, name: str) -> str:
    """A name as users write it; data sets have hyphens."""
    return name.replace("_", "-") if kind == "data" else name


def facts_of(record: Recorded[Any]) -> Facts | None:
    """The declared facts of a method at its defaults; None where it has options without a default."""
    if any(parameter.default is inspect.Parameter.empty for parameter in record.signature.parameters.values()):
        return None
    made: Facts = record.extra["build_with"]().facts
    return made


def fact_values(facts: Facts) -> dict[str, Any]:
    """Facts under names for JSON."""
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
    """Whether it works when only some clients take part in a round."""
    if facts.full_participation:
        return "no"
    return "state ages" if facts.client_state else "yes"


def described(kind: str, record: Recorded[Any]) -> dict[str, Any]:
    """A registered thing as one line of a list."""
    found: dict[str, Any] = {"name": written(kind, record.name), "summary": first_sentence(record.doc)}
    facts = facts_of(record) if kind == "methods" else None
    return found | ({} if facts is None else fact_values(facts))


def listed(kind: str) -> list[dict[str, Any]]:
    """All there is of a kind."""
    if kind == RECIPES:
        return [{"name": name, "summary": read(name).title} for name in shipped_names()]
    registry = registry_of(kind)
    return [described(kind, registry.find(name)) for name in registry.names()]
