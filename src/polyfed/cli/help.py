"""Help of commands with many options: ``--help`` shows the twelve that people use first, ``--help-all`` all of them in groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from polyfed.cli.option_groups import GROUPS, group_of
from polyfed.cli.output import console

HELP_ALL = "--help-all"


class ManyOptions(TyperCommand):
    """A command that has more options than a person reads; ``first`` names the parameters that ``--help`` shows."""

    first: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(option_for_all(sum(map(is_own_option, self.params))))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the first options."""
        self.copy_with([param for name in self.first for param in self.params if param.name == name]).full_help(ctx, formatter)

    def full_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options that this command has."""
        super().format_help(ctx, formatter)

    def grouped(self) -> ManyOptions:
        """The same command, all its options in groups."""
        options: list[Any] = [copy.copy(param) for param in self.params if is_own_option(param)]
        for option in options:
            option.rich_help_panel = group_of(option.name)
        return self.copy_with(sorted(options, key=lambda option: GROUPS.index(option.rich_help_panel)))

    def copy_with(self, options: list[Any]) -> ManyOptions:
        """The same command with other options; its arguments stay, and so does what prints help."""
        made = copy.copy(self)
        others = [param for param in self.params if not is_own_option(param)]
        made.params = [*options, *others]
        return made


def option_for_all(number: int) -> Any:
    """The option that prints all options. Typer makes it from a function: its releases differ in how an option is built by hand."""
    asked = typer.Option(
        False,
        HELP_ALL,
        is_eager=True,
        expose_value=False,
        callback=print_all_options,
        show_default=False,
        help=f"Show all {number} options, in groups.",
    )

    def shown(help_all: bool = asked) -> None:
        pass

    app = typer.Typer(add_completion=False)
    app.command()(shown)
    return next(param for param in get_command(app).params if HELP_ALL in param.opts)


def print_panels(usage: str, about: str, panels: Mapping[str, Sequence[tuple[str, str]]], epilog: str) -> None:
    """Print the help of the group of all commands; typer's own way would cost more time than all the rest."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table

    out = console()
    out.print(f"\n {usage}\n\n {about}\n", markup=False)
    widest = max(len(name) for title, rows in panels.items() for name, _ in rows)
    for title, rows in panels.items():
        shown = Table(box=None, show_header=False, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        shown.add_column(style="bold cyan", no_wrap=True, width=widest)
        shown.add_column(ratio=1)
        for row in rows:
            shown.add_row(*row)
        out.print(Panel(shown, title=title, title_align="left", border_style="dim", box=box.ROUNDED))
    out.print(f"\n {epilog}\n", markup=False)


def is_own_option(param: Any) -> bool:
    """Whether a parameter is an option of the command, and not one that prints help."""
    return param.param_type_name == "option" and HELP_ALL not in param.opts


def print_all_options(ctx: Any, param: Any, asked: bool) -> None:
    """Print help with every option, and end."""
    if asked and not ctx.resilient_parsing:
        ctx.command.grouped().full_help(ctx, ctx.make_formatter())
        ctx.exit()
