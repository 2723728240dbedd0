"""Help in panels; if a command has many options, ``--help`` shows twelve and ``--help-all`` shows all of them, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from polyfed.cli.output import console
from polyfed.errors import nearest

GROUPS = ("Data", "Model and method", "Training", "Clients", "Evaluation", "Speed", "Output")
"""Option groups, in the order of the help. Settings declare their group; other options are in ``OTHER_GROUPS`` or "Output"."""
OTHER_GROUPS: Mapping[str, str] = {
    **dict.fromkeys(("methods", "recipe", "changes", "trust"), "Model and method"),
    **dict.fromkeys(("protocol", "hold_out"), "Evaluation"),
    **dict.fromkeys(("seeds", "set_grid", "trials", "sampler", "halving"), "Training"),
}


def group_of(name: str) -> str:
    """Return the group of the option with this parameter name.

    >>> group_of("lr"), group_of("as_json")
    ('Training', 'Output')
    """
    from polyfed.settings import FACTS

    return FACTS[name].group if name in FACTS else OTHER_GROUPS.get(name, "Output")


class Argument(click.Argument):
    """An argument with help."""

    def __init__(self, *args: Any, help: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = help

    def make_metavar(self, ctx: click.Context) -> str:
        written = self.metavar or str(self.name).upper()
        return written if self.required or written.startswith("[") else f"[{written}]"


class Command(click.Command):
    """A command. ``first`` lists the parameters that ``--help`` shows if there are many."""

    def __init__(self, *args: Any, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = first
        if first:
            text = f"Show all {sum(isinstance(param, click.Option) for param in self.params)} options, in groups."
            how: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
            self.params.append(click.Option(["--help-all"], callback=_print_all_options, help=text, **how))

    def get_help(self, ctx: click.Context) -> str:
        shown = self.get_params(ctx)
        if self.first:
            by_name = {param.name: param for param in shown}
            shown = [*_arguments(shown), *(by_name[name] for name in (*self.first, "help_all", "help"))]
        return help_text(self, ctx, {"Options": option_rows(shown, ctx)})

    def help_with_all(self, ctx: click.Context) -> str:
        panels: dict[str, list[Any]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            panels["Options" if param.name in ("help_all", "help") else group_of(str(param.name))].append(param)
        return help_text(self, ctx, {title: option_rows(params, ctx) for title, params in panels.items()})


def _print_all_options(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        assert isinstance(ctx.command, Command)
        click.echo(ctx.command.help_with_all(ctx))
        ctx.exit()


class Group(click.Group):
    """A command with subcommands."""

    command_class = Command

    def get_help(self, ctx: click.Context) -> str:
        commands = [(name, " ".join((command.help or "").split("\n\n")[0].split())) for name, command in self.commands.items()]
        return help_text(self, ctx, {"Options": option_rows(self.get_params(ctx), ctx), "Commands": commands})

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"Unknown command {args[0]!r}. {nearest(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


def _arguments(params: Sequence[click.Parameter]) -> list[Argument]:
    return [param for param in params if isinstance(param, Argument)]


def option_rows(params: Sequence[click.Parameter], ctx: click.Context) -> list[tuple[str, ...]]:
    """Return the names, the metavar and the help of each option."""
    rows: list[tuple[str, ...]] = []
    for param in params:
        if isinstance(param, click.Option):
            value = "" if param.is_flag else param.make_metavar(ctx)
            value = {"INTEGER": "N", "INTEGER RANGE": "N", "FLOAT": "NUMBER"}.get(value, value)
            notes = [f"[env var: {param.envvar}]"] if param.show_envvar else []
            default = param.show_default if isinstance(param.show_default, str) else param.default
            if not param.is_flag and param.show_default is not False and default != "" and isinstance(default, str | int | float):
                notes.append(f"[default: {default}]")
            notes += ["[required]"] if param.required else []
            rows.append((", ".join([*param.opts, *param.secondary_opts]), value, " ".join([param.help or "", *notes])))
    return rows


def help_text(command: click.Command, ctx: click.Context, panels: Mapping[str, Sequence[tuple[str, ...]]]) -> str:
    """Return the help of a command: usage, description, arguments, panels and examples."""
    from rich import box
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    arguments = [
        (param.make_metavar(ctx), f"{param.help} [required]" if param.required else param.help)
        for param in _arguments(command.params)
    ]
    filled = {title: rows for title, rows in {"Arguments": arguments, **panels}.items() if rows}
    # In a group, the first column has the same width in all panels of commands.
    commands = (
        [row[0] for title, rows in filled.items() if title != "Options" for row in rows] if isinstance(command, Group) else []
    )
    out = console()
    with out.capture() as captured:
        out.print()
        for text in (command.get_usage(ctx), *_paragraphs(command.help)):
            out.print(Padding(Text(text), (0, 1, 1, 1)))
        for title, rows in filled.items():
            shown = Table(box=None, show_header=False, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
            shown.add_column(
                style="bold cyan", no_wrap=True, width=max(map(len, commands)) if commands and title != "Options" else None
            )
            if len(rows[0]) == 3:
                shown.add_column(no_wrap=True)
            shown.add_column(ratio=1)
            for row in rows:
                shown.add_row(*map(Text, row))
            out.print(Panel(shown, title=title, title_align="left", border_style="dim", box=box.ROUNDED))
        for place, text in enumerate(_paragraphs(command.epilog)):
            out.print(Padding(Text(text), (place == 0, 1, 0, 1)))
    return captured.get().rstrip("\n") + "\n"


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n") if paragraph.strip()]
