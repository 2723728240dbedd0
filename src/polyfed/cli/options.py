"""Options shared by several commands, and one option per setting."""

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
DEVICE_HELP = "Device: cpu, cuda, mps or auto."


def argument(name: str, metavar: str, help: str, **how: Any) -> Decorator[Any]:
    return click.argument(name, cls=Argument, metavar=metavar, help=help, **how)


def flag(*names: str, help: str, **how: Any) -> Decorator[Any]:
    return click.option(*names, is_flag=True, help=help, **how)


def repeatable(*names: str, metavar: str, help: str) -> Decorator[Any]:
    return click.option(*names, multiple=True, metavar=metavar, help=help)


SHARED: Mapping[str, Decorator[Any]] = {
    "run": argument("path", "RUN", "Run folder."),
    "data": argument(
        "data",
        "DATA",
        "Data set name, image folder root/<domain>/<class>/*, or table of images (.csv, .tsv, .parquet).",
        required=False,
        shell_complete=complete("data"),
    ),
    "json": flag("--json", "as_json", help="Print the result as JSON on the last line of standard output."),
    "quiet": flag("--quiet", "-q", help="Suppress tables, progress and warnings."),
    "wide": flag("--wide", help="Show all table columns, even if they exceed the terminal width."),
    "explain": flag("--explain", help="Explain the numbers below each table."),
    "estimate": flag("--estimate", help="Estimate the cost (core-hours, MB) from a few batches, without training."),
    "recipe": click.option(
        "--recipe",
        metavar="FILE|NAME",
        help="Recipe name (polyfed ls recipes), recipe file, or run.toml of a run. Other options override it.",
        shell_complete=complete("recipes"),
    ),
    "set": repeatable("--set", "changes", metavar="KEY=VALUE", help="Override any setting; repeatable."),
    "methods": click.option(
        "--methods",
        metavar="TEXTS",
        help='Methods, separated by semicolons. Add settings for one method with "with": "fedavg; fedwon with lr=0.2". '
        "Default: the methods of the recipe.",
        shell_complete=complete("methods", "+;"),
    ),
    "load": repeatable("--load", metavar="FILE", help="Python file with custom methods; repeatable."),
    "data root": click.option(
        "--root", metavar="DIR", envvar="POLYFED_DATA", show_envvar=True, help="Folder with the data sets of the experiments."
    ),
    "track": repeatable("--track", metavar="NAME", help="Also log to tensorboard, mlflow or wandb; repeatable."),
    "device": click.option("--device", metavar="DEVICE", default="auto", show_default=False, help=DEVICE_HELP),
    "resume device": click.option("--device", metavar="DEVICE", help=DEVICE_HELP),
    "trust": flag(
        "--trust",
        help="Trust the recipe or run folder and run code that it refers to, even if polyfed cannot verify that you wrote it. See polyfed inspect.",
    ),
    "allow unfinished": flag(
        "--allow-unfinished", help="Use a run without its final state (unfinished, damaged or diverged); results carry a warning."
    ),
    "override model": click.option("--model", metavar="MODEL", help="Override the run's model: a name, or module.path:function."),
    "moved load": click.option(
        "--load",
        multiple=True,
        metavar="FILE",
        callback=lambda _context, _param, files: files or None,
        help="Method file of the run, if it has moved; repeatable.",
    ),
}
REOPEN_OPTIONS = ("device", "moved load", "override model", "trust", "allow unfinished")
"""Options of commands that open a run. The functions of ``api.py`` have parameters with these names."""


def shared(*names: str) -> Decorator[Any]:
    """Add arguments and options from ``SHARED`` to a command, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for name in reversed(names):
            command = SHARED[name](command)
        return command

    return decorate


def command(name: str, *examples: str, first: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Command]:
    """Turn a function into a command. ``first`` lists the parameters that ``--help`` shows if there are many."""
    return click.command(name, cls=Command, epilog=example_text(*examples), first=first)


def example_text(*examples: str) -> str:
    """Format the examples below the help of a command."""
    return f"Example: {examples[0]}" if len(examples) == 1 else "\n\n".join(["Examples:", *examples])


def settings_except(*excluded: str) -> Decorator[Any]:
    """Add an option for each other setting to a command, which receives the values as keywords (None if not passed)."""

    def decorate(command: Decorated) -> Decorated:
        for name in reversed(setting_names()):
            if name not in excluded:
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
        metavar={"root": "DIR", "load": "FILE"}.get(name, METAVARS[facts.type]),
        help=facts.doc,
        show_default=False if repeated or default is None else str(default),
        shell_complete=OF_SETTINGS.get(name),
    )


def resolve_values(recipe: str | None = None, changes: Iterable[str] = (), trust: bool = False, **values: Any) -> dict[str, Any]:
    """Return the settings for a function of ``api.py``.

    Args:
        recipe: Recipe name or file.
        changes: Values of ``--set``, which override everything else.
        trust: Run the code that the recipe refers to.
        values: Values of arguments and options, None or () if not passed. They override the recipe.
    """
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if trust and recipe is None:
        raise SettingError("--trust requires --recipe.")
    written = {} if recipe is None else read(recipe).values
    trusted = NOTHING if recipe is None else trust_of(recipe, written, trust)
    changed = dict(map(read_change, changes))
    chosen = layered(written, given, changed)
    if "data" not in chosen:
        raise SettingError("DATA is missing. Pass a data set name (polyfed ls data) or a folder root/<domain>/<class>/*.")
    settings = with_changes(Settings(), chosen)
    typed = with_changes(Settings(), {name: value for name, value in {**given, **changed}.items() if name in ("load", "model")})
    trusted.adding(code_in(typed.load, typed.model)).require(code_in(settings.load, settings.model))
    return chosen


def resolve_settings(
    data: str | None, values: Mapping[str, Any], changes: Iterable[str] | None, recipe: str, trust: bool = False
) -> Settings:
    """Return ``resolve_values`` as ``Settings``."""
    return with_changes(Settings(), resolve_values(recipe, changes or (), trust, **{**values, "data": data})).trusted()


def resolve_methods(methods: str | None, recipe: str | None) -> Any:
    """Return ``--methods``, or the ``[methods]`` table of the recipe."""
    if methods is not None:
        return methods
    found = {} if recipe is None else read(recipe).methods
    if not found:
        raise SettingError(
            'No methods to compare. Pass --methods "fedavg; fedbn", or a recipe with a [methods] table (polyfed compare --recipe demo).'
        )
    return found
