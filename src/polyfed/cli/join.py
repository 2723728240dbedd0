"""``polyfed join``: a node next to its data."""

from __future__ import annotations

from pathlib import Path

import click

from polyfed.cli.options import argument, command, flag
from polyfed.cli.output import print_now
from polyfed.cli.serve import words_without
from polyfed.errors import SettingError

REFUSED = 3


@command("join", "polyfed join node-1.kit --data /srv/images --domain sketch")
@argument("kit", "KIT", "Kit file that the server created for this node.", required=False)
@click.option(
    "--data",
    metavar="DIR|NAME",
    default="",
    help="Image folder root/<domain>/<class>/*, or data set name. The images stay on this machine.",
)
@click.option("--domain", metavar="NAME", default="", help="Domain of this node.")
@click.option("--client", metavar="NAME", default="", help="Client name in tables. Default: the domain.")
@flag("--allow-newcomer", help="Allow the server to collect this node's local layers once, to build a newcomer model.")
@click.option("--folder", metavar="DIR", help="Node folder. Default: the name of the kit, in the current folder.")
@click.option("--write-units", metavar="DIR", help="Write a systemd unit and a compose file for this node, and exit.")
def join(
    kit: str | None, data: str, domain: str, client: str, allow_newcomer: bool, folder: str | None, write_units: str | None
) -> None:
    """Start a node: create its keys, enrol, and serve the requests that node.toml allows until it is stopped."""
    from polyfed.flower.join.join import join as run_node
    from polyfed.flower.join.policy import Policy, Refused

    if kit is None and folder is None:
        raise SettingError("Pass a kit file, or --folder for a node that has already joined.")
    node_folder = Path(folder or Path(str(kit)).stem)
    # Absolute, because services start in another folder. Data set names are not changed.
    source = str(Path(data).expanduser().resolve()) if data and Path(data).expanduser().is_dir() else data
    given = Policy(data=source, domain=domain, client=client, newcomer=allow_newcomer)
    if write_units is not None:
        from polyfed.flower.deploy.units import write_node_units

        for file in write_node_units(Path(write_units), words_without("--write-units"), node_folder, given.data):
            print(file)
        return
    try:
        run_node(None if kit is None else Path(kit), node_folder, given, print_now)
    except Refused as error:
        print_now(f"polyfed: {error}", error=True)
        raise click.exceptions.Exit(REFUSED) from error
