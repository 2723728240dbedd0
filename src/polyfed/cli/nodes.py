"""``polyfed nodes``: the nodes of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyfed.cli.help import Group
from polyfed.cli.options import argument, example_text, shared
from polyfed.cli.output import print_json
from polyfed.cli.serve import server_folder

if TYPE_CHECKING:
    from polyfed.flower.deploy.folders import ServerFolder

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
