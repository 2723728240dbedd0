"""``polyfed serve``: a server for nodes on other machines, in one command."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.completion import complete
from polyfed.cli.deploy import needs_flower, refuse_what_cannot_run
from polyfed.cli.options import Changes, Trust, chosen_settings
from polyfed.errors import SettingError

EXAMPLE = "Example: polyfed serve demo --host fl.example.org --nodes 3 --set method=fedbn"
FOLDER, PORT, LISTEN = "polyfed-server", 8443, "0.0.0.0"

ServerFolderPath = Annotated[str, typer.Option("--folder", metavar="DIR", help="Folder of the server.")]


def serve(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Recipe by name or file (polyfed ls recipes).", autocompletion=complete("recipes")),
    ],
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Name or address by which nodes reach this machine.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes the run waits for; each gets a kit.")],
    changes: Changes = None,
    folder: ServerFolderPath = FOLDER,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port that nodes reach.")] = PORT,
    listen: Annotated[str, typer.Option("--listen", metavar="ADDRESS", help="Address of this machine to listen on.")] = LISTEN,
    newcomer: Annotated[
        bool, typer.Option("--newcomer", help="At the end, ask nodes for layers that stay local, for a newcomer's model.")
    ] = False,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", metavar="KEY=VALUE", help="Such as patience=240 (docs/deploy.md); may be repeated."),
    ] = None,
    trust: Trust = False,
    write_units: Annotated[
        str | None,
        typer.Option(
            "--write-units", metavar="DIR", help="Start nothing: write a systemd unit and a compose file for this command."
        ),
    ] = None,
) -> None:
    """Serve a recipe to nodes on other machines: makes certificates and kits, waits for the nodes, trains, and ends with the run."""
    needs_flower()
    from polyfed.runs.training_defaults import with_declared_by_name

    settings = with_declared_by_name(chosen_settings(None, {}, changes, recipe, trust=trust))
    refuse_what_cannot_run(settings, recipe)
    from polyfed.flower.serve.serve import Failed, Wanted
    from polyfed.flower.serve.serve import serve as run_server

    config = dict(read_config(text) for text in run_config or ())
    wanted = Wanted(settings, recipe, host, nodes, Path(folder), port, listen, newcomer, config)
    if write_units is not None:
        from polyfed.flower.deploy.units import write_server_units

        for file in write_server_units(Path(write_units), words_without("--write-units"), wanted.folder, port):
            print(file)
        return
    try:
        raise typer.Exit(run_server(wanted, said))
    except Failed as error:
        said(f"polyfed: {error}", error=True)
        raise typer.Exit(1) from error


def words_without(option: str) -> list[str]:
    """The words of this command, without an option and its value."""
    import sys

    words = sys.argv[1:]
    while option in words:
        at = words.index(option)
        del words[at : at + 2]
    return [word for word in words if not word.startswith(f"{option}=")]


def said(line: str, error: bool = False) -> None:
    """Print a line at once, also where the output is a file."""
    import sys

    from polyfed.cli.visible import visible

    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def read_config(text: str) -> tuple[str, Any]:
    """Read ``key=value`` of a run's configuration."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise SettingError(f"--run-config takes key=value, found {text!r}.")
    if written in ("true", "false"):
        return key.strip(), written == "true"
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        value = written
    return key.strip(), float(value) if isinstance(value, int) and not isinstance(
        value, bool
    ) and key.strip() != "min-nodes" else value
