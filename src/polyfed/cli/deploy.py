"""``polyfed serve``, ``join``, ``nodes`` and ``deploy``: training with nodes on other machines."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.completion import complete
from polyfed.cli.help import Group
from polyfed.cli.options import argument, command, example_text, flag, repeatable, resolve_settings, shared
from polyfed.cli.output import print_json, print_now
from polyfed.errors import SettingError
from polyfed.text import literal_or_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.flower.deploy.folders import ServerFolder
    from polyfed.settings import Settings


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
    """Start a node: create its keys, enrol, and serve the requests that node.toml allows, until stopped."""
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


node_name = argument("name", "NAME", "Node name.")


@click.group("nodes", cls=Group)
def nodes() -> None:
    """Manage the nodes of a server."""


def _server_at(folder: str) -> ServerFolder:
    from polyfed.flower.deploy.folders import ServerFolder

    found = ServerFolder(Path(folder))
    found.description()  # raises an error if this is not a server folder
    return found


@nodes.command("list", epilog=example_text("polyfed nodes list --folder polyfed-server"))
@server_folder
@shared("json")
def list_nodes(folder: str, as_json: bool) -> None:
    """List nodes with their status (invited, enrolled or revoked), certificate expiry and last contact."""
    server = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry, days_left
    from polyfed.flower.serve.serve import SEEN

    seen_file = server.path / SEEN
    seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
    rows = [
        {
            "node": node.name,
            "state": node.state,
            "client": node.client,
            "days left": days_left(node),
            "last seen": seen.get(node.name),
        }
        for node in NodeRegistry.read(server.path).nodes.values()
    ]
    if as_json:
        print_json({"nodes": rows})
        return
    for row in rows:
        client = f" as {row['client']}" if row["client"] else ""
        expiry = f", certificate expires in {row['days left']} days" if row["state"] == "enrolled" else ""
        last = f"last seen {row['last seen']}" if row["last seen"] else "never seen"
        print(f"{row['node']}: {row['state']}{client}{expiry}, {last}")


@nodes.command("revoke", epilog=example_text("polyfed nodes revoke node-2"))
@node_name
@server_folder
def revoke(name: str, folder: str) -> None:
    """Revoke a node's access. Takes effect on a running server within a second."""
    server = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(server.path) as registry:
        registry.revoke(name)
    AuditLog(server.audit).write("revoked", node=name)
    print(f"Revoked {name}.")


@nodes.command("renew", epilog=example_text("polyfed nodes renew node-2"))
@node_name
@server_folder
def renew(name: str, folder: str) -> None:
    """Write a new kit for a node that lost its keys, for a revoked node, or for an additional node.

    Invalidates the old certificate.
    """
    server = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.flower.serve.serve import invite
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(server.path) as registry:
        file = invite(server, registry, name)
    AuditLog(server.audit).write("invited", node=name)
    print(file)


@click.group("deploy", cls=Group)
def deploy() -> None:
    """Create files for your own Flower deployment."""


@deploy.command("init", epilog=example_text("polyfed deploy init trial/app --recipe demo --set rounds=5"))
@argument("folder", "DIR", "Folder for the Flower app.")
@click.option(
    "--recipe", metavar="FILE|NAME", required=True, help="Recipe name (polyfed ls recipes), recipe file, or run.toml of a run."
)
@shared("set", "trust")
def init(folder: str, recipe: str, changes: Sequence[str], trust: bool) -> None:
    """Create a Flower app folder for a recipe. Existing files are not overwritten."""
    from polyfed.flower.app import write_app

    for file in write_app(Path(folder), runnable_settings(recipe, changes, trust), recipe):
        print(file)
        if file.suffix == ".py":
            print(f"  SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}: nodes run this file only if they list it.")
    print("To start the server, the nodes and the run, see docs/own-superlink.md.")


def runnable_settings(recipe: str, changes: Sequence[str], trust: bool) -> Settings:
    """Return the settings of a recipe, checked for problems that would otherwise appear when the server or a node starts."""
    from polyfed.runs.training_settings import with_declared_by_name
    from polyfed.studies.compare.recipes.checks import problems_of

    settings = with_declared_by_name(resolve_settings(None, {}, changes, recipe, trust))
    if problems := problems_of(settings):
        raise SettingError(f"{recipe}: {' '.join(problems)}")
    return settings
