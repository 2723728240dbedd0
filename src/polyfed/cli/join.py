"""``polyfed join``: a node next to its data, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.deploy import needs_flower
from polyfed.cli.serve import said, words_without

EXAMPLE = "Example: polyfed join node-1.kit --data /srv/images --domain sketch"
REFUSED = 3


def join(
    kit: Annotated[str | None, typer.Argument(metavar="KIT", help="File that the server wrote for this node.")] = None,
    data: Annotated[
        str, typer.Option("--data", metavar="DIR|NAME", help="Image folder root/<domain>/<class>/*, or a data set; it stays here.")
    ] = "",
    domain: Annotated[str, typer.Option("--domain", metavar="NAME", help="Which domain of the data this node holds.")] = "",
    client: Annotated[str, typer.Option("--client", metavar="NAME", help="Name in tables; default: the domain.")] = "",
    allow_newcomer: Annotated[
        bool, typer.Option("--allow-newcomer", help="Let layers that stay here be asked for once, for a newcomer's model.")
    ] = False,
    folder: Annotated[
        str | None,
        typer.Option("--folder", metavar="DIR", help="Folder of this node; default: the kit's name, in the current folder."),
    ] = None,
    write_units: Annotated[
        str | None,
        typer.Option("--write-units", metavar="DIR", help="Start nothing: write a systemd unit and a compose file for this node."),
    ] = None,
) -> None:
    """Join a server as a node: makes its keys, enrols, and answers what node.toml allows until it is stopped."""
    needs_flower()
    from polyfed.errors import SettingError
    from polyfed.flower.join.join import join as run_node
    from polyfed.flower.join.policy import Policy, Refused

    if kit is None and folder is None:
        raise SettingError("Name a kit, or the --folder of a node that has joined.")
    place = Path(folder or Path(str(kit)).stem)
    given = Policy(data=anchored(data), domain=domain, client=client, newcomer=allow_newcomer)
    if write_units is not None:
        from polyfed.flower.deploy.units import write_node_units

        for file in write_node_units(Path(write_units), words_without("--write-units"), place, given.data):
            print(file)
        return
    try:
        run_node(None if kit is None else Path(kit), place, given, said)
    except Refused as error:
        said(f"polyfed: {error}", error=True)
        raise typer.Exit(REFUSED) from error


def anchored(data: str) -> str:
    """A folder by its whole path, since services start elsewhere; a data set by its name."""
    return str(Path(data).expanduser().resolve()) if data and Path(data).expanduser().is_dir() else data
