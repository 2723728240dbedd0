"""``polyfed join``: a node next to its data, in one command."""

from __future__ import annotations

from pathlib import Path

import click

from polyfed.cli.options import argument, command, flag
from polyfed.cli.output import print_at_once
from polyfed.cli.serve import words_without
from polyfed.errors import SettingError

REFUSED = 3


@command("join", "polyfed join node-1.kit --data /srv/images --domain sketch")
@argument("kit", "KIT", "File that the server wrote for this node.", required=False)
@click.option("--data", metavar="DIR|NAME", default="", help="Image folder root/<domain>/<class>/*, or a data set; it stays here.")
@click.option("--domain", metavar="NAME", default="", help="Which domain of the data this node holds.")
@click.option("--client", metavar="NAME", default="", help="Name in tables; default: the domain.")
@flag("--allow-newcomer", help="Let layers that stay here be asked for once, for a newcomer's model.")
@click.option("--folder", metavar="DIR", help="Folder of this node; default: the kit's name, in the current folder.")
@click.option("--write-units", metavar="DIR", help="Start nothing: write a systemd unit and a compose file for this node.")
def join(
    kit: str | None, data: str, domain: str, client: str, allow_newcomer: bool, folder: str | None, write_units: str | None
) -> None:
    """Join a server as a node: makes its keys, enrols, and answers what node.toml allows until it is stopped."""
    from polyfed.flower.join.join import join as run_node
    from polyfed.flower.join.policy import Policy, Refused

    if kit is None and folder is None:
        raise SettingError("Name a kit, or the --folder of a node that has joined.")
    place = Path(folder or Path(str(kit)).stem)
    given = Policy(data=_anchored(data), domain=domain, client=client, newcomer=allow_newcomer)
    if write_units is not None:
        from polyfed.flower.deploy.units import write_node_units

        for file in write_node_units(Path(write_units), words_without("--write-units"), place, given.data):
            print(file)
        return
    try:
        run_node(None if kit is None else Path(kit), place, given, print_at_once)
    except Refused as error:
        print_at_once(f"polyfed: {error}", error=True)
        raise click.exceptions.Exit(REFUSED) from error


def _anchored(data: str) -> str:
    """Return a folder by its whole path, since services start elsewhere; a data set by its name."""
    return str(Path(data).expanduser().resolve()) if data and Path(data).expanduser().is_dir() else data
