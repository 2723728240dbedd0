"""List of all commands with their groups, modules and help lines; a command is imported when it is called."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import click

from polyfed.cli.guard import Guarded, command_suggestion
from polyfed.cli.help import help_text, option_rows
from polyfed.errors import MissingExtra


@dataclass(frozen=True)
class Entry:
    """A command that is imported on demand.

    Attributes:
        name: Name of the command.
        home: Location of the command, as ``module:function``.
        line: Line in ``polyfed --help``.
        package: Package that the command needs. The command is listed only if the package is installed. Empty if none.
        install: What to install for it.
    """

    name: str
    home: str
    line: str
    package: str = ""
    install: str = ""

    @property
    def is_available(self) -> bool:
        return not self.package or find_spec(self.package) is not None


COMMANDS: dict[str, tuple[Entry, ...]] = {
    "Train and compare": (
        Entry("run", "polyfed.cli.run:run", "Train one method."),
        Entry("compare", "polyfed.cli.compare:compare", "Train and compare several methods."),
        Entry("sweep", "polyfed.cli.sweep:sweep", "Tune methods on validation data, then test the best settings."),
        Entry("doctor", "polyfed.cli.doctor:doctor", "Diagnose batch-norm problems and recommend a method."),
        Entry("reproduce", "polyfed.cli.reproduce:reproduce", "Reproduce a table or figure from a paper."),
        Entry("resume", "polyfed.cli.run:resume", "Resume an interrupted run."),
        Entry("watch", "polyfed.cli.report:watch", "Show the progress of runs."),
    ),
    "Use trained models": (
        Entry("report", "polyfed.cli.report:report", "Write an HTML report: best method, confidence, costs."),
        Entry("analyse", "polyfed.cli.report:analyse", "Analyse why a method works, with figures and tables."),
        Entry("evaluate", "polyfed.cli.evaluate:evaluate", "Evaluate a run on its own or other data."),
        Entry("predict", "polyfed.cli.evaluate:predict", "Predict the classes of images."),
        Entry("export", "polyfed.cli.evaluate:export", "Export a model to onnx, pt2 or safetensors."),
        Entry("inspect", "polyfed.cli.inspect:inspect", "Show the contents of a run folder without running its code."),
        Entry("digest", "polyfed.cli.inspect:digest", "Print a hash of the final state of a run."),
    ),
    "Look up": (
        Entry("ls", "polyfed.cli.browse:ls", "List methods, data sets, models, recipes and more."),
        Entry("show", "polyfed.cli.browse:show", "Show details of a method, data set, model or recipe."),
        Entry("data", "polyfed.cli.data:data", "Download, check and pack data sets."),
        Entry("info", "polyfed.cli.inspect:info", "Print version and hardware information for bug reports."),
    ),
    "Deploy": (Entry("audit", "polyfed.cli.audit:audit", "Verify audit logs; measure privacy leakage."),),
}


@functools.cache
def commands() -> dict[str, list[Entry]]:
    """Return all commands by group, including unavailable ones. Those of entry points come first in their group."""
    from importlib.metadata import entry_points

    found = {title: list(group) for title, group in COMMANDS.items()}
    for point in entry_points(group="polyfed.commands"):
        try:
            module = point.load()
        except Exception as error:  # a defect in another package must not disable the help
            print(f"Skipping the commands of {point.value}: {error}", file=sys.stderr)
            continue
        added = [Entry(name, home, line, module.PACKAGE, module.INSTALL) for name, home, line in module.COMMANDS]
        found[module.GROUP] = added + found.get(module.GROUP, [])
    return found


def entries() -> dict[str, Entry]:
    """Return the available commands by name, in the order of the help."""
    return {entry.name: entry for group in commands().values() for entry in group if entry.is_available}


@functools.cache
def imported(entry: Entry) -> click.Command:
    module, _, attribute = entry.home.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    command.short_help = entry.line
    return command


class AllCommands(Guarded):
    """Group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Entry points are read only if necessary, because reading them takes longer than everything else.
        for groups in (lambda: COMMANDS, commands):
            known = next((entry for group in groups().values() for entry in group if entry.name == cmd_name), None)
            if known is not None:
                break
        if known is None or (not known.is_available and ctx.resilient_parsing):
            return None
        if not known.is_available:
            raise MissingExtra(f"polyfed {cmd_name} needs {known.package}. Install it with: pip install '{known.install}'")
        return imported(known)

    def get_help(self, ctx: click.Context) -> str:
        listed = {title: [(entry.name, entry.line) for entry in group if entry.is_available] for title, group in commands().items()}
        options = [(name, words) for name, _, words in option_rows(self.get_params(ctx), ctx)]
        return help_text(self, ctx, {**listed, "Options": options})

    def unknown(self, typed: str) -> str:
        return command_suggestion(typed, entries())
