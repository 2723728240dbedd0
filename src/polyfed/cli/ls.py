"""``polyfed ls``: what there is."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.docstrings import first_sentence
from polyfed.cli.options import Json, Load
from polyfed.cli.output import busy, console, print_json, table
from polyfed.errors import UnknownName, nearest
from polyfed.recipes import read, shipped_names

if TYPE_CHECKING:
    from polyfed.method import Facts
    from polyfed.registry import Recorded, Registry

KINDS = ("methods", "data", "models", "partitions", "losses")
RECIPES = "recipes"
LISTS = (*KINDS, RECIPES)
EXAMPLE = "Example: polyfed ls methods"


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind of thing."""
    from polyfed.data.federation import data_sets, partitions
    from polyfed.losses import losses
    from polyfed.method import methods
    from polyfed.models import models

    known: dict[str, Registry[Any]] = dict(zip(KINDS, (methods, data_sets, models, partitions, losses), strict=True))
    if kind not in known:
        raise UnknownName(f"There is no list of {kind!r}. {nearest(kind, LISTS)}")
    return known[kind]


def written(kind: str, name: str) -> str:
    """A name as users write it; data sets have hyphens."""
    return name.replace("_", "-") if kind == "data" else name


def load_files(files: list[str] | None) -> None:
    """Run users' files of methods."""
    from polyfed.method import load_file

    for file in files or ():
        load_file(file)


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
        "leaves_client": facts.leaves or "model entries only",
        "leaves_grain": facts.grain or "none",
        "messages": facts.messages,
        "extra_work": facts.extra_work,
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


def ls(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of: {', '.join(LISTS)}.")],
    load: Load = None,
    as_json: Json = False,
) -> None:
    """List methods, data sets, models, partitions, losses or recipes."""
    from rich.markup import escape

    with busy("Looking", as_json):
        load_files(load)
        rows = listed(kind)
    if as_json:
        print_json({"kind": kind, "items": rows})
    elif kind == "methods":
        _print_methods(rows)
    else:
        shown = table(("name", "what"))
        for row in rows:
            shown.add_row(row["name"], escape(row["summary"]))
        console().print(shown)


def _print_methods(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    shown = table(
        ("name", "what", "needs\nbatch\nnorm", "keeps\nstate", "smallest\nbatch", "sampled\nclients", "what leaves\na client")
    )
    shown.columns[0].no_wrap = True
    for row in rows:
        if "needs_batch_norm" in row:
            smallest = row["smallest_batch"] or "model's"
            facts = (
                _yes(row["needs_batch_norm"]),
                _yes(row["keeps_client_state"]),
                str(smallest),
                row["sampled_clients"],
                row["leaves_client"],
            )
        else:
            facts = ("?",) * 5
        shown.add_row(row["name"], escape(row["summary"]), *map(escape, facts))
    console().print(shown)
    console().print(
        "[dim]smallest batch: model's = what the model allows (2 with batch norm, else 1). "
        "sampled clients: state ages = works, but the state of clients that sit out gets old.[/dim]"
    )


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
