"""The group of all commands: listed from ``commands.py``, imported one by one when they are called."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command, get_group

from polyfed.cli.commands import GROUPS, Entry, entries
from polyfed.cli.guard import Guarded
from polyfed.cli.help import ManyOptions, print_panels


class AllCommands(Guarded):
    """Knows every command by its line of help, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of help."""
        return [*entries(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported; None where there is none."""
        known = entries().get(cmd_name)
        return super().get_command(ctx, cmd_name) if known is None else imported(known)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print help without importing any command."""
        options = [(", ".join(param.opts), getattr(param, "help", "")) for param in self.get_params(ctx)]
        commands = {title: [(entry.name, entry.line) for entry in group] for title, group in GROUPS.items()}
        print_panels(self.get_usage(ctx), self.help or "", {**commands, "Options": options}, self.epilog or "")


@functools.cache
def imported(entry: Entry) -> Any:
    """The command of an entry as typer makes it."""
    module_name, _, attribute = entry.home.partition(":")
    module = importlib.import_module(f"polyfed.cli.{module_name}")
    found = getattr(module, attribute)
    if isinstance(found, typer.Typer):
        made: Any = get_group(found)
    else:
        first = getattr(found, "first_options", None)
        kind = TyperCommand if first is None else type("WithFirst", (ManyOptions,), {"first": first})
        single = typer.Typer(add_completion=False)
        single.command(entry.name, cls=kind, epilog=getattr(module, entry.example))(found)
        made = get_command(single)
    made.name, made.short_help = entry.name, entry.line
    return made
