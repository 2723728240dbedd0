"""``polyfed serve``: a server for nodes on other machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete
from polyfed.cli.deploy import runnable_settings
from polyfed.cli.options import argument, command, flag, repeatable, shared
from polyfed.cli.output import print_now
from polyfed.errors import SettingError
from polyfed.text import literal_or_text

if TYPE_CHECKING:
    from collections.abc import Sequence

server_folder = click.option("--folder", metavar="DIR", default="polyfed-server", help="Server folder.")


@command("serve", "polyfed serve demo --host fl.example.org --nodes 3 --set method=fedbn")
@argument("recipe", "RECIPE", "Recipe name (polyfed ls recipes) or file.", shell_complete=complete("recipes"))
@click.option("--host", metavar="NAME", required=True, help="Host name or IP address that nodes connect to.")
@click.option("--nodes", metavar="N", type=int, required=True, help="Number of nodes to wait for. Writes one kit per node.")
@shared("set")
@server_folder
@click.option("--port", metavar="N", type=int, default=8443, help="Port that nodes connect to.")
@click.option("--listen", metavar="ADDRESS", default="0.0.0.0", help="IP address to listen on.")
@flag("--newcomer", help="After training, collect the nodes' local layers once to build a newcomer model.")
@repeatable("--run-config", metavar="KEY=VALUE", help="Run configuration, such as patience=240; repeatable. See docs/deploy.md.")
@shared("trust")
@click.option("--write-units", metavar="DIR", help="Write a systemd unit and a compose file for this command, and exit.")
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
    """Start a server: create certificates and kits, wait for the nodes, train, and exit."""
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
        raise click.exceptions.Exit(run_server(wanted, print_now))
    except Failed as error:
        print_now(f"polyfed: {error}", error=True)
        raise click.exceptions.Exit(1) from error


def words_without(option: str) -> list[str]:
    """Return the arguments of this command without an option and its value."""
    words = sys.argv[1:]
    while option in words:
        index = words.index(option)
        del words[index : index + 2]
    return [word for word in words if not word.startswith(f"{option}=")]


def _read_config(text: str) -> tuple[str, Any]:
    """Parse ``key=value``. Integers become floats except for ``min-nodes``, since Flower checks the types."""
    key, equals, written = text.partition("=")
    name = key.strip()
    if not equals or not name:
        raise SettingError(f"--run-config must be key=value, got {text!r}.")
    if written in ("true", "false"):
        return name, written == "true"
    value = literal_or_text(written)
    return name, float(value) if type(value) is int and name != "min-nodes" else value
