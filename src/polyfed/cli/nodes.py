"""``polyfed nodes``: who may come in to a server."""

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

node_name = argument("name", "NAME", "Name of the node.")


@click.group("nodes", cls=Group)
def nodes() -> None:
    """Who may come in to a server: list nodes, revoke one, or let one enrol again."""


def _server_at(folder: str) -> ServerFolder:
    """Return the folder of a server; one that is none is refused."""
    from polyfed.flower.deploy.folders import ServerFolder

    place = ServerFolder(Path(folder))
    place.description()
    return place


@nodes.command("list", epilog=example_text("polyfed nodes list --folder polyfed-server"))
@server_folder
@shared("json")
def list_nodes(folder: str, as_json: bool) -> None:
    """List nodes: invited, enrolled or revoked, when their certificates end, and when they were last seen."""
    place = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry, days_left
    from polyfed.flower.serve.serve import SEEN

    seen_file = place.path / SEEN
    seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
    rows = [
        {
            "node": node.name,
            "state": node.state,
            "client": node.client,
            "days left": days_left(node),
            "last seen": seen.get(node.name),
        }
        for node in NodeRegistry.read(place.path).nodes.values()
    ]
    if as_json:
        print_json({"nodes": rows})
        return
    for row in rows:
        client = f" as {row['client']}" if row["client"] else ""
        left = f", certificate for {row['days left']} days" if row["state"] == "enrolled" else ""
        last = f"last seen {row['last seen']}" if row["last seen"] else "never seen"
        print(f"{row['node']}: {row['state']}{client}{left}, {last}")


@nodes.command("revoke", epilog=example_text("polyfed nodes revoke node-2"))
@node_name
@server_folder
def revoke(name: str, folder: str) -> None:
    """Let a node in no more. A server that runs notices at once."""
    place = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(place.path) as registry:
        registry.revoke(name)
    AuditLog(place.audit).write("revoked", node=name)
    print(f"{name} is revoked.")


@nodes.command("renew", epilog=example_text("polyfed nodes renew node-2"))
@node_name
@server_folder
def renew(name: str, folder: str) -> None:
    """Write a new kit for a node that lost its keys or was revoked, or for one more; its old certificate counts no more."""
    place = _server_at(folder)
    from polyfed.flower.serve.registry import NodeRegistry
    from polyfed.flower.serve.serve import invite
    from polyfed.runs.folder.audit_log import AuditLog

    with NodeRegistry.changed(place.path) as registry:
        file = invite(place, registry, name)
    AuditLog(place.audit).write("invited", node=name)
    print(file)
