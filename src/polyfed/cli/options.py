"""One option of the command line for each field of Settings: names and help are written once, there."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from polyfed.cli.completion import OF_SETTINGS, complete
from polyfed.cli.recipe import recipe_methods, recipe_values
from polyfed.errors import SettingError
from polyfed.settings import FACTS, Settings, read_change, setting_names, with_changes
from polyfed.studies.compare.recipes import layered
from polyfed.trust import NOTHING, code_in

METAVARS = {int: "N", float: "NUMBER", str: "TEXT", list[str]: "TEXT"}
REST = "values"

Data = Annotated[
    str | None,
    typer.Argument(metavar="DATA", help="A data set, or a folder root/<domain>/<class>/*.", autocompletion=complete("data")),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing else: no table, progress or warnings.")]
Wide = Annotated[bool, typer.Option("--wide", help="Print all columns of tables, also where the terminal is narrower.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say below the tables what their numbers mean.")]
EstimateOnly = Annotated[
    bool,
    typer.Option("--estimate", help="Train nothing: measure a few batches, and print what it would cost (core-hours, MB)."),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FILE|NAME",
        help="Recipe (polyfed ls recipes), or the run.toml of a run; options given here win.",
        autocompletion=complete("recipes"),
    ),
]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its name; may be repeated.")]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="TEXTS",
        help='Methods, apart by semicolons, settings of their own after "with": "fedavg; fedwon with lr=0.2". Default: the methods of the recipe.',
        show_default=False,
        autocompletion=complete("methods", "+;"),
    ),
]
Load = Annotated[list[str] | None, typer.Option("--load", metavar="FILE", help="File of methods of your own; may be repeated.")]
DataRoot = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", envvar="POLYFED_DATA", help="Folder that holds the files of experiments' data sets."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Where models are computed on this machine: cpu, cuda, mps or auto."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Write to a tracker too: tensorboard, mlflow or wandb; may be repeated."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that the recipe or run folder names, though this account did not write it (polyfed inspect)."
    ),
]
ModelAgain = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The run's model, named again: a name, or module.path:function."),
]
LoadElsewhere = Annotated[
    list[str] | None,
    typer.Option("--load", metavar="FILE", help="The run's file of methods, where it lies elsewhere now; may be repeated."),
]


def with_settings(*left_out: str, first: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting; those given reach it as ``values``.

    Args:
        left_out: Settings the command has an argument of its own for.
        first: The options that ``--help`` shows; ``--help-all`` shows all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        generated = {name: _parameter(name) for name in setting_names() if name not in left_out}
        hints = typing.get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values() if p.name != REST]

        def filled(**given: Any) -> None:
            found = {name: given.pop(name) for name in generated}
            values = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if v is not None and v != []}
            command(**given, **{REST: values})

        parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *generated.values()]
        filled.__name__, filled.__doc__ = command.__name__, command.__doc__
        filled.first_options = first  # type: ignore[attr-defined]
        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        filled.__annotations__ = {p.name: p.annotation for p in parameters}
        return filled

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    """A setting as a parameter; None says that it was not given."""
    facts = FACTS[name]
    several, default = facts.type == list[str], facts.default
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=facts.doc + ("; may be repeated" if several else "" if default is None else f" (default {default})"),
        show_default=False,
        metavar=METAVARS[facts.type],
        autocompletion=OF_SETTINGS.get(name),
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[facts.type | None, option])


def chosen_settings(
    data: str | None,
    values: Mapping[str, Any],
    changes: Iterable[str] | None = None,
    recipe: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Settings:
    """The settings of a run: the command's own defaults, then a recipe's, then those given as options, then those of ``--set``."""
    given = {**values, **({"data": data} if data is not None else {})}
    if trust and recipe is None:
        raise SettingError("--trust is about the code that a recipe names, and no --recipe was given. Leave it out.")
    written, trusted = recipe_values(recipe, trust) if recipe is not None else ({}, NOTHING)
    changed = dict(read_change(text) for text in changes or ())
    chosen = layered(defaults or {}, written, given, changed)
    if "data" not in chosen:
        raise SettingError("Name the data to train on: a data set (polyfed ls data) or a folder root/<domain>/<class>/*.")
    settings = with_changes(Settings(), chosen)
    asked_for = with_changes(Settings(), {name: value for name, value in {**given, **changed}.items() if name in ("load", "model")})
    trusted = trusted.adding(code_in(asked_for.load, asked_for.model))
    trusted.require(code_in(settings.load, settings.model))
    return dataclasses.replace(settings, trust=trusted)


def compared_methods(methods: str | None, recipe: str | None) -> Any:
    """What is compared: the methods of the command line, else those of the recipe's table ``[methods]``."""
    if methods is not None:
        return methods
    found = {} if recipe is None else recipe_methods(recipe)
    if not found:
        raise SettingError(
            'Name the methods to compare: --methods "fedavg; fedbn", or a recipe with a table [methods] (polyfed compare --recipe demo).'
        )
    return found


def arguments(settings: Settings) -> dict[str, Any]:
    """Settings as the functions of ``api.py`` that take several methods take them."""
    return {name: getattr(settings, name) for name in setting_names() if name != "method"}
