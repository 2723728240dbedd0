"""Options that several commands have, and one for each field of Settings: names and help of those are written once, there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from polyfed.cli.completion import OF_SETTINGS, complete
from polyfed.cli.help import Argument, Command
from polyfed.errors import SettingError
from polyfed.settings import FACTS, Settings, read_change, setting_names, with_changes
from polyfed.studies.compare.recipes import layered, read, trust_of
from polyfed.trust import NOTHING, code_in

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

METAVARS = {int: "N", float: "NUMBER", str: "TEXT", list[str]: "TEXT"}
DEVICE_HELP = "Where models are computed on this machine: cpu, cuda, mps or auto."


def argument(name: str, metavar: str, help: str, **how: Any) -> Decorator[Any]:
    """Give a command an argument."""
    return click.argument(name, cls=Argument, metavar=metavar, help=help, **how)


def flag(*names: str, help: str, **how: Any) -> Decorator[Any]:
    """Give a command an option without a value."""
    return click.option(*names, is_flag=True, help=help, **how)


def several(*names: str, metavar: str, help: str) -> Decorator[Any]:
    """Give a command an option that may be repeated."""
    return click.option(*names, multiple=True, metavar=metavar, help=help)


SHARED: Mapping[str, Decorator[Any]] = {
    "run": argument("path", "RUN", "A run folder."),
    "data": argument(
        "data", "DATA", "A data set, or a folder root/<domain>/<class>/*.", required=False, shell_complete=complete("data")
    ),
    "json": flag("--json", "as_json", help="Print one JSON object as the last line of standard output."),
    "quiet": flag("--quiet", "-q", help="Print nothing else: no table, progress or warnings."),
    "wide": flag("--wide", help="Print all columns of tables, also where the terminal is narrower."),
    "explain": flag("--explain", help="Say below the tables what their numbers mean."),
    "estimate": flag("--estimate", help="Train nothing: measure a few batches, and print what it would cost (core-hours, MB)."),
    "recipe": click.option(
        "--recipe",
        metavar="FILE|NAME",
        help="Recipe (polyfed ls recipes), or the run.toml of a run; options given here win.",
        shell_complete=complete("recipes"),
    ),
    "set": several("--set", "changes", metavar="KEY=VALUE", help="Any setting by its name; may be repeated."),
    "methods": click.option(
        "--methods",
        metavar="TEXTS",
        help='Methods, apart by semicolons, settings of their own after "with": "fedavg; fedwon with lr=0.2". Default: the methods of the recipe.',
        shell_complete=complete("methods", "+;"),
    ),
    "load": several("--load", metavar="FILE", help="File of methods of your own; may be repeated."),
    "data root": click.option(
        "--root",
        metavar="DIR",
        envvar="POLYFED_DATA",
        show_envvar=True,
        help="Folder that holds the files of experiments' data sets.",
    ),
    "track": several("--track", metavar="NAME", help="Write to a tracker too: tensorboard, mlflow or wandb; may be repeated."),
    "device": click.option("--device", metavar="DEVICE", default="auto", show_default=False, help=DEVICE_HELP),
    "another device": click.option("--device", metavar="DEVICE", help=DEVICE_HELP),
    "trust": flag(
        "--trust", help="Run the code that the recipe or run folder names, though this account did not write it (polyfed inspect)."
    ),
    "model again": click.option("--model", metavar="MODEL", help="The run's model, named again: a name, or module.path:function."),
    "load elsewhere": click.option(
        "--load",
        multiple=True,
        metavar="FILE",
        callback=lambda _context, _param, files: files or None,
        help="The run's file of methods, where it lies elsewhere now; may be repeated.",
    ),
}
REOPENED = ("device", "load elsewhere", "model again", "trust")
"""What opening a run needs to know: the functions of ``api.py`` take these under the same names."""


def shared(*names: str) -> Decorator[Any]:
    """Give a command arguments and options of ``SHARED``, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for name in reversed(names):
            command = SHARED[name](command)
        return command

    return decorate


def command(name: str, *examples: str, first: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command; ``first`` names the parameters that ``--help`` shows if there are many."""
    return click.command(name, cls=Command, epilog=example_text(*examples), first=first)


def example_text(*examples: str) -> str:
    """Return the text below the help of a command."""
    return f"Example: {examples[0]}" if len(examples) == 1 else "\n\n".join(["Examples:", *examples])


def settings_except(*left_out: str) -> Decorator[Any]:
    """Give a command an option for each setting but those that it reads itself; it receives them as keywords, None if not given."""

    def decorate(command: Decorated) -> Decorated:
        for name in reversed(setting_names()):
            if name not in left_out:
                command = _setting_option(name)(command)
        return command

    return decorate


def _setting_option(name: str) -> Decorator[Any]:
    facts = FACTS[name]
    repeated, default = facts.type == list[str], facts.default
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        type=str if repeated else facts.type,
        multiple=repeated,
        metavar=METAVARS[facts.type],
        help=facts.doc + ("; may be repeated" if repeated else "" if default is None else f" (default {default})"),
        shell_complete=OF_SETTINGS.get(name),
    )


def chosen_values(
    values: Mapping[str, Any], recipe: str | None = None, changes: Iterable[str] = (), trust: bool = False
) -> dict[str, Any]:
    """Return the settings that a user chose, as the functions of ``api.py`` take them.

    Args:
        values: Those given as arguments and options; None or () if one was not given. They win over the recipe's.
        recipe: A recipe that has others.
        changes: Those of ``--set``, which win over all.
        trust: Run the code that the recipe names.
    """
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if trust and recipe is None:
        raise SettingError("--trust is about the code that a recipe names, and no --recipe was given. Leave it out.")
    written = {} if recipe is None else read(recipe).values
    trusted = NOTHING if recipe is None else trust_of(recipe, written, trust)
    changed = dict(map(read_change, changes))
    chosen = layered(written, given, changed)
    if "data" not in chosen:
        raise SettingError("Name the data to train on: a data set (polyfed ls data) or a folder root/<domain>/<class>/*.")
    settings = with_changes(Settings(), chosen)
    asked_for = with_changes(Settings(), {name: value for name, value in {**given, **changed}.items() if name in ("load", "model")})
    trusted.adding(code_in(asked_for.load, asked_for.model)).require(code_in(settings.load, settings.model))
    return chosen


def chosen_settings(
    data: str | None, values: Mapping[str, Any], changes: Iterable[str] | None, recipe: str, trust: bool = False
) -> Settings:
    """Return ``chosen_values`` as one value."""
    return with_changes(Settings(), chosen_values({**values, "data": data}, recipe, changes or (), trust)).trusted()


def compared_methods(methods: str | None, recipe: str | None) -> Any:
    """Return what is compared: the methods of the command line, else those of the recipe's table ``[methods]``."""
    if methods is not None:
        return methods
    found = {} if recipe is None else read(recipe).methods
    if not found:
        raise SettingError(
            'Name the methods to compare: --methods "fedavg; fedbn", or a recipe with a table [methods] (polyfed compare --recipe demo).'
        )
    return found
