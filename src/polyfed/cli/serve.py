"""``polyfed serve``: a server for nodes on other machines, in one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete
from polyfed.cli.deploy import runnable_settings
from polyfed.cli.options import argument, command, flag, several, shared
from polyfed.cli.output import print_at_once
from polyfed.errors import SettingError
from polyfed.text import literal_or_text

if TYPE_CHECKING:
    from collections.abc import Sequence

server_folder = click.option("--folder", metavar="DIR", default="polyfed-server", help="Folder of the server.")


@command("serve", "polyfed serve demo --host fl.example.org --nodes 3 --set method=fedbn")
@argument("recipe", "RECIPE", "Recipe by name or file (polyfed ls recipes).", shell_complete=complete("recipes"))
@click.option("--host", metavar="NAME", required=True, help="Name or address by which nodes reach this machine.")
@click.option("--nodes", metavar="N", type=int, required=True, help="How many nodes the run waits for; each gets a kit.")
@shared("set")
@server_folder
@click.option("--port", metavar="N", type=int, default=8443, help="Port that nodes reach.")
@click.option("--listen", metavar="ADDRESS", default="0.0.0.0", help="Address of this machine to listen on.")
@flag("--newcomer", help="At the end, ask nodes for layers that stay local, for a newcomer's model.")
@several("--run-config", metavar="KEY=VALUE", help="Such as patience=240 (docs/deploy.md); may be repeated.")
@shared("trust")
@click.option("--write-units", metavar="DIR", help="Start nothing: write a systemd unit and a compose file for this command.")
def serve(
    recipe: str,
    host: str,
    nodes: int,
    changes: Sequence[str],
    folder: str,
    port: int,
    listen: str,
    newcomer: bool,
    run_config: Sequence[str],
    trust: bool,
    write_units: str | None,
) -> None:
    """Serve a recipe to nodes on other machines: makes certificates and kits, waits for the nodes, trains, and ends with the run."""
    settings = runnable_settings(recipe, changes, trust)
    from polyfed.flower.serve.serve import Failed, Wanted
    from polyfed.flower.serve.serve import serve as run_server

    config = dict(map(_read_config, run_config))
    wanted = Wanted(settings, recipe, host, nodes, Path(folder), port, listen, newcomer, config)
    if write_units is not None:
        from polyfed.flower.deploy.units import write_server_units

        for file in write_server_units(Path(write_units), words_without("--write-units"), wanted.folder, port):
            print(file)
        return
    try:
        raise click.exceptions.Exit(run_server(wanted, print_at_once))
    except Failed as error:
        print_at_once(f"polyfed: {error}", error=True)
        raise click.exceptions.Exit(1) from error


def words_without(option: str) -> list[str]:
    """Return the words of this command, without an option and its value."""
    words = sys.argv[1:]
    while option in words:
        at = words.index(option)
        del words[at : at + 2]
    return [word for word in words if not word.startswith(f"{option}=")]


def _read_config(text: str) -> tuple[str, Any]:
    """Read ``key=value`` of a run's configuration; Flower knows no integer where a number may have a fraction."""
    key, equals, written = text.partition("=")
    name = key.strip()
    if not equals or not name:
        raise SettingError(f"--run-config takes key=value, found {text!r}.")
    if written in ("true", "false"):
        return name, written == "true"
    value = literal_or_text(written)
    return name, float(value) if type(value) is int and name != "min-nodes" else value
