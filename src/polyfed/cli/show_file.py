"""``polyfed show`` of what is a file: a recipe or an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.cli.output import View, busy, console, print_json, print_table, table
from polyfed.errors import same_name
from polyfed.studies.report.kinds import EXPERIMENTS, RECIPES


@dataclass(frozen=True)
class ShownFile:
    """A recipe or an experiment, by its own name."""

    kind: str
    name: str


def file_names() -> list[str]:
    """The names of all recipes and experiments."""
    from polyfed.papers.files import item_names
    from polyfed.studies.compare.recipes import shipped_names

    return [*shipped_names(), *item_names()]


def file_called(name: str) -> ShownFile | None:
    """The recipe or experiment that a name stands for; also a recipe of the user's own, by its path."""
    from polyfed.papers.files import item_names
    from polyfed.studies.compare.recipes import SUFFIX, shipped_names

    if name.endswith(SUFFIX) and Path(name).is_file():
        return ShownFile(RECIPES, name)
    for kind, names in ((RECIPES, shipped_names()), (EXPERIMENTS, item_names())):
        found = same_name(name, names)
        if found is not None:
            return ShownFile(kind, found)
    return None


def print_file(shown: ShownFile, as_json: bool, view: View) -> None:
    """Print a recipe or an experiment in full."""
    with busy("Looking", as_json):
        found = recipe_json(shown.name) if shown.kind == RECIPES else experiment_json(shown.name)
    if as_json:
        print_json(found)
    elif shown.kind == RECIPES:
        _print_recipe(found, view)
    else:
        _print_experiment(found, view)


def recipe_json(name: str) -> dict[str, Any]:
    """All that a recipe says."""
    from polyfed.studies.compare.recipes import read

    recipe = read(name)
    return {
        "kind": "recipe",
        "name": name,
        "about": dict(recipe.about),
        "settings": dict(recipe.values),
        "methods": {text: dict(own) for text, own in recipe.methods.items()},
        "command": recipe.command,
    }


def experiment_json(name: str) -> dict[str, Any]:
    """What an experiment claims, what it needs, and what it costs."""
    from polyfed.papers.costs import experiment_row
    from polyfed.papers.files import read_item

    item = read_item(name)
    parts = [
        {"name": part.name, "methods": [row.name for row in part.rows], "columns": [column.name for column in part.columns]}
        for part in item.parts
    ]
    about = {"claim": item.claim, "measure": item.measure, "seeds": item.seeds, "note": item.note}
    return {
        "kind": "experiment",
        **experiment_row(name),
        **about,
        "parts": parts,
        "command": f"polyfed reproduce {name} --root DATA",
    }


def _print_recipe(found: dict[str, Any], view: View) -> None:
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(found['name'])}[/bold] [dim]recipe[/dim]\n")
    for key, value in found["about"].items():
        out.print(escape(str(value) if key == "title" else f"{key}: {value}"))
    _print_pairs("settings", found["settings"], view)
    if found["methods"]:
        compared = {text: ", ".join(f"{key}={value}" for key, value in own.items()) for text, own in found["methods"].items()}
        _print_pairs("methods", compared, view, ("method", "settings of its own"))
    if found["command"]:
        out.print(found["command"], soft_wrap=True, markup=False)


def _print_experiment(found: dict[str, Any], view: View) -> None:
    from rich.markup import escape

    from polyfed.papers.costs import here_words

    out = console()
    out.print(f"[bold]{escape(found['name'])}[/bold] [dim]experiment[/dim]\n")
    out.print(escape(f"{found['paper']}, {found['item']}: {found['title']}."))
    hours = [
        f"{found[key]:,.1f}" if found[key] is not None else "-"
        for key in ("core_hours_full", "core_hours_laptop", "core_hours_reduced")
    ]
    facts = {
        "claim": found["claim"],
        "data": ", ".join(found["data"]),
        "data here": {"no": "no (--root DIR, or POLYFED_DATA)"}.get(words := here_words(found), words),
        "runs": f"{found['runs']}, {hours[0]} core-hours; laptop {hours[1]}; reduced {hours[2]}",
        "state": "; ".join([found["state"], *found["missing"]]),
        "note": found["note"],
    }
    _print_pairs("", {key: value for key, value in facts.items() if value}, view, ("what", "found"))
    parts = table(("part", "methods", "columns"))
    for part in found["parts"]:
        parts.add_row(*(escape(text) for text in (part["name"], ", ".join(part["methods"]), ", ".join(part["columns"]))))
    print_table("what it shows", parts, view)
    out.print(found["command"], soft_wrap=True, markup=False)


def _print_pairs(title: str, pairs: dict[str, Any], view: View, heads: tuple[str, str] = ("setting", "value")) -> None:
    from rich.markup import escape

    shown = table(heads)
    for key, value in pairs.items():
        shown.add_row(escape(key), escape(str(value)))
    print_table(title, shown, view)
