"""The command ``polyfed``. A command is imported when it is called (``commands.py``), so that help comes at once."""

from __future__ import annotations

import os

import click

from polyfed.cli.commands import AllCommands
from polyfed.runs.malloc import keep_freed_pages


@click.group(
    "polyfed",
    cls=AllCommands,
    invoke_without_command=True,
    epilog="Start with: polyfed compare digits-mini --methods 'fedavg; fedbn' --rounds 5",
)
@click.option("--debug", is_flag=True, envvar="POLYFED_DEBUG", help="Show the stack trace of an error (POLYFED_DEBUG=1).")
@click.option("--version", is_flag=True, help="Print the version.")
@click.option("--install-completion", is_flag=True, help="Install completion for the current shell.")
@click.option(
    "--show-completion",
    is_flag=True,
    help="Show completion for the current shell, to copy it or customize the installation.",
)
@click.pass_context
def app(context: click.Context, debug: bool, version: bool, install_completion: bool, show_completion: bool) -> None:
    """Multi-domain federated learning: a method is a value, and methods add up."""
    if version:
        print(_version())
    elif install_completion or show_completion:
        from polyfed.cli.completion import completion_script, install

        print(install(app) if install_completion else completion_script(app)[1])
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())
    else:
        return
    context.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("polyfed")
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Run the command line."""
    # Before torch is imported: large tensors on huge pages save a tenth of the time of a step with 14 million parameters.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed_pages()
    app(prog_name="polyfed")


if __name__ == "__main__":
    main()
