"""The ServerApp of ``polyfed serve``, which records every request and reply in the server's audit log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from polyfed.flower.app import OUT, settings_from
from polyfed.flower.deploy.folders import ServerFolder
from polyfed.flower.serve.registry import NodeRegistry
from polyfed.flower.server.roster import ClientNames
from polyfed.flower.server_app import log_result, prepare, run_on_grid
from polyfed.flower.wire.records import audited
from polyfed.runs.folder.audit_log import AuditLog

app = ServerApp()
NO_CONTENT = {"bytes": 0, "content": ""}


class EnrolledNames(ClientNames):
    """Client names on a server with enrolled nodes, which are identified by the name of their key.

    The client name that a node reported when it enrolled is reserved for it, even while it is offline.
    """

    numbers_change = False

    def __init__(self, server: ServerFolder, folder: Path | None = None) -> None:
        super().__init__(folder)
        self.server = server

    def node_name(self, node: int) -> str:
        return _enrolled_name(self.server, node)

    def owners(self) -> Mapping[str, str]:
        return {**self.first, **NodeRegistry.read(self.server.path).client_names()}


def _enrolled_name(folder: ServerFolder, node: int) -> str:
    names = json.loads(folder.node_numbers.read_text()) if folder.node_numbers.exists() else {}
    return str(names.get(str(node), node))


class AuditedGrid:
    """A Grid that records messages in the audit log."""

    def __init__(self, grid: Grid, folder: ServerFolder) -> None:
        self.grid, self.folder, self.audit = grid, folder, AuditLog(folder.audit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        accepted = list(self.grid.push_messages(sent))
        for message in sent:
            if message.metadata.message_id in accepted:
                self.write("asked", message, message.metadata.dst_node_id, message.metadata.message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(self.grid.pull_messages(message_ids))
        for message in found:
            self.write("answered", message, message.metadata.src_node_id, message.metadata.reply_to_message_id)
        return found

    def write(self, event: str, message: Message, node: int, about: str) -> None:
        self.audit.write(
            event,
            node=_enrolled_name(self.folder, node),
            run=str(message.metadata.run_id),
            what=message.metadata.message_type,
            round=message.metadata.group_id,
            message=about,
            **(audited(message.content) if message.has_content() else NO_CONTENT | {"error": str(message.error.reason)}),
        )


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = ServerFolder.of_this_process()
    prepare(grid)
    config = {**context.run_config, OUT: str(folder.run)}
    names = EnrolledNames(folder, folder.run)
    log_result(run_on_grid(AuditedGrid(grid, folder), settings_from(config), config, names))
