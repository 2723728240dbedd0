"""Every command: its group, its name, where its code is, and its line in ``polyfed --help``.

The code of a command is imported when it is called. To add one, add a line here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import click

from polyfed.cli.guard import Guarded
from polyfed.cli.help import help_text, option_rows
from polyfed.errors import MissingExtra

ENTRY_POINTS = "polyfed.commands"
"""Entry points that add commands: modules with ``GROUP``, ``PACKAGE``, ``INSTALL`` and ``COMMANDS`` (``polyfed.flower.commands``)."""


@dataclass(frozen=True)
class Entry:
    """A command that is not imported yet.

    Attributes:
        name: What users type.
        home: A module, and the command in it.
        line: Its line in ``polyfed --help``.
        package: What it needs; without that package it is not listed.
        install: What installs the package.
    """

    name: str
    home: str
    line: str
    package: str = ""
    install: str = ""

    @property
    def is_available(self) -> bool:
        return not self.package or find_spec(self.package) is not None


GROUPS: dict[str, tuple[Entry, ...]] = {
    "Train and compare": (
        Entry("run", "polyfed.cli.run:run", "Train a federation and write a run folder."),
        Entry("compare", "polyfed.cli.compare:compare", "Train several methods and compare them in one table."),
        Entry("sweep", "polyfed.cli.sweep:sweep", "Search settings on validation data, then test them."),
        Entry("doctor", "polyfed.cli.doctor:doctor", "Say whether batch norm will hurt, and what to use."),
        Entry("reproduce", "polyfed.cli.reproduce:reproduce", "Run a paper's table or figure again."),
        Entry("resume", "polyfed.cli.run:resume", "Go on with a run that was stopped."),
        Entry("watch", "polyfed.cli.watch:watch", "Show curves of runs while they are trained."),
    ),
    "Use what was trained": (
        Entry("report", "polyfed.cli.report:report", "Write a page about runs: who won, and how surely."),
        Entry("analyse", "polyfed.cli.analyse:analyse", "Explain why a method works, in figures and numbers."),
        Entry("evaluate", "polyfed.cli.evaluate:evaluate", "Score a run on its own data, or on other data."),
        Entry("predict", "polyfed.cli.predict:predict", "Say the classes of image files."),
        Entry("export", "polyfed.cli.export:export", "Write a model to a file: onnx, pt2 or safetensors."),
        Entry("inspect", "polyfed.cli.inspect:inspect", "Show what a run folder contains, running no code."),
        Entry("digest", "polyfed.cli.digest:digest", "Print one hash over the final state of a run."),
    ),
    "Look things up": (
        Entry("ls", "polyfed.cli.browse:ls", "List methods, data, models, recipes and more."),
        Entry("show", "polyfed.cli.browse:show", "Show one of them in full."),
        Entry("data", "polyfed.cli.data:data", "Look after the files of data sets."),
        Entry("info", "polyfed.cli.info:info", "Print versions, cores and devices, for bug reports."),
    ),
    "Deploy": (Entry("audit", "polyfed.cli.audit:audit", "Check audit logs; measure what a run gives away."),),
}


@functools.cache
def all_groups() -> dict[str, list[Entry]]:
    """Return every command by its group, also those whose package is not installed; those of entry points come first."""
    from importlib.metadata import entry_points

    found = {title: list(group) for title, group in GROUPS.items()}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            module = point.load()
        except Exception as error:  # a package of somebody else must not take away help
            print(f"{point.value} adds commands to polyfed and cannot be imported: {error}", file=sys.stderr)
            continue
        added = [Entry(name, home, line, module.PACKAGE, module.INSTALL) for name, home, line in module.COMMANDS]
        found[module.GROUP] = added + found.get(module.GROUP, [])
    return found


def entries() -> dict[str, Entry]:
    """Return the commands that can be called, by name, in the order of help."""
    return {entry.name: entry for group in all_groups().values() for entry in group if entry.is_available}


@functools.cache
def imported(entry: Entry) -> click.Command:
    """Return the command of an entry."""
    module, _, attribute = entry.home.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    command.short_help = entry.line
    return command


class AllCommands(Guarded):
    """Knows every command by its line of help, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Entry points are read only if they are needed: that takes longer than all the rest.
        for groups in (lambda: GROUPS, all_groups):
            known = next((entry for group in groups().values() for entry in group if entry.name == cmd_name), None)
            if known is not None:
                if not known.is_available and ctx.resilient_parsing:
                    return None
                if not known.is_available:
                    raise MissingExtra(f"polyfed {cmd_name} needs {known.package}. Install it with: pip install '{known.install}'")
                return imported(known)
        return None

    def get_help(self, ctx: click.Context) -> str:
        """Return help without importing any command."""
        commands = {
            title: [(entry.name, entry.line) for entry in group if entry.is_available] for title, group in all_groups().items()
        }
        options = [(name, words) for name, _, words in option_rows(self.get_params(ctx), ctx)]
        return help_text(self, ctx, {**commands, "Options": options})

    def unknown(self, typed: str) -> str:
        from polyfed.cli.suggestions import command_suggestion

        return command_suggestion(typed, entries())
