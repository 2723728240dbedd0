"""List of all commands with their groups, modules and help lines; a command is imported when it is called."""

from __future__ import annotations

import functools
import importlib
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
        needs_flower: The command is listed only if Flower is installed.
    """

    name: str
    home: str
    line: str
    needs_flower: bool = False

    @property
    def is_available(self) -> bool:
        return not self.needs_flower or find_spec("flwr") is not None


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
    "Deploy": (
        Entry("serve", "polyfed.cli.deploy:serve", "Start a server and train with remote nodes.", needs_flower=True),
        Entry("join", "polyfed.cli.deploy:join", "Start a node and join a server.", needs_flower=True),
        Entry("nodes", "polyfed.cli.deploy:nodes", "List, revoke and renew the nodes of a server.", needs_flower=True),
        Entry("deploy", "polyfed.cli.deploy:deploy", "Create files for your own Flower deployment.", needs_flower=True),
        Entry("audit", "polyfed.cli.audit:audit", "Verify audit logs; measure privacy leakage."),
    ),
}


def entries() -> dict[str, Entry]:
    """Return the available commands by name, in the order of the help."""
    return {entry.name: entry for group in COMMANDS.values() for entry in group if entry.is_available}


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
        known = next((entry for group in COMMANDS.values() for entry in group if entry.name == cmd_name), None)
        if known is None or (ctx.resilient_parsing and not known.is_available):
            return None
        if not known.is_available:
            raise MissingExtra(f"polyfed {cmd_name} needs flwr. Install it with: pip install 'polyfed[flower]'")
        return imported(known)

    def get_help(self, ctx: click.Context) -> str:
        commands = {title: [(entry.name, entry.line) for entry in group if entry.is_available] for title, group in COMMANDS.items()}
        options = [(name, words) for name, _, words in option_rows(self.get_params(ctx), ctx)]
        return help_text(self, ctx, {**commands, "Options": options})

    def unknown(self, typed: str) -> str:
        return command_suggestion(typed, entries())
