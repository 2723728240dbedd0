"""``polyfed nodes``: who may come in to a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.deploy import needs_flower
from polyfed.cli.options import Json
from polyfed.cli.output import print_json
from polyfed.cli.serve import FOLDER, ServerFolderPath

if TYPE_CHECKING:
    from polyfed.flower.deploy.folders import ServerFolder

LIST_EXAMPLE = "Example: polyfed nodes list --folder polyfed-server"
REVOKE_EXAMPLE = "Example: polyfed nodes revoke node-2"
RENEW_EXAMPLE = "Example: polyfed nodes renew node-2"

nodes_app = typer.Typer(help="Who may come in to a server: list nodes, revoke one, or let one enrol again.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")]


def server_at(folder: str | Path) -> ServerFolder:
    """The folder of a server; one that is none is refused."""
    needs_flower()
    from polyfed.flower.deploy.folders import ServerFolder

    place = ServerFolder(Path(folder))
    place.description()
    return place


@nodes_app.command("list", epilog=LIST_EXAMPLE)
def list_nodes(folder: ServerFolderPath = FOLDER, as_json: Json = False) -> None:
    """List nodes: invited, enrolled or revoked, when their certificates end, and when they were last seen."""
    place = server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry, days_left
    from polyfed.flower.serve.serve import SEEN

    seen_file = place.path / SEEN
    seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
    nodes = NodeRegistry.read(place.path).nodes.values()
    rows = [
        {
            "node": node.name,
            "state": node.state,
            "client": node.client,
            "days left": days_left(node),
            "last seen": seen.get(node.name),
        }
        for node in nodes
    ]
    if as_json:
        print_json({"nodes": rows})
        return
    for row in rows:
        left = f", certificate for {row['days left']} days" if row["state"] == "enrolled" else ""
        client = f" as {row['client']}" if row["client"] else ""
        print(
            f"{row['node']}: {row['state']}{client}{left}, {'last seen ' + str(row['last seen']) if row['last seen'] else 'never seen'}"
        )


@nodes_app.command("revoke", epilog=REVOKE_EXAMPLE)
def revoke(name: Name, folder: ServerFolderPath = FOLDER) -> None:
    """Let a node in no more. A server that runs notices at once."""
    place = server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(place.path) as registry:
        registry.revoke(name)
    AuditLog(place.audit).write("revoked", node=name)
    print(f"{name} is revoked.")


@nodes_app.command("renew", epilog=RENEW_EXAMPLE)
def renew(name: Name, folder: ServerFolderPath = FOLDER) -> None:
    """Write a new kit for a node that lost its keys or was revoked, or for one more; its old certificate counts no more."""
    place = server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.flower.serve.serve import invite
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(place.path) as registry:
        file = invite(place, registry, name)
    AuditLog(place.audit).write("invited", node=name)
    print(file)
