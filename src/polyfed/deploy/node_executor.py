"""The executor of a joined node: runs the guarded ClientApp for every message, and nothing that a bundle brings.

    python -m polyfed.deploy.node_executor 127.0.0.1:9094

Flower's own code would unpack each bundle and import the ClientApp that it names. Here bundles are checked first, and only those
whose code the node lists are unpacked; the ClientApp is always polyfed's.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import flwr.supernode.runtime.run_clientapp as clientapp
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp

from polyfed.deploy import guarded_app
from polyfed.deploy.bundle_check import check_bundle
from polyfed.deploy.policy import Policy, Refused
from polyfed.deploy.private_files import OTHERS
from polyfed.flower import executor
from polyfed.runs.audit_log import AuditLog

log = logging.getLogger("polyfed")


def checked_install(content: bytes, **_: Any) -> None:
    """In the place of Flower's unpacking: refuse, or unpack what the node lists, or do nothing."""
    folder = guarded_app.node_folder()
    try:
        brought = check_bundle(content, Policy.read(folder.policy).code)
    except Refused as error:
        log.warning("%s", error)
        AuditLog(folder.audit).write("app bundle refused", why=str(error))
        raise
    guarded_app.listed_code.clear()
    guarded_app.listed_code.update(brought)
    if brought:
        sys.path.insert(0, str(install_from_fab(content, skip_prompt=True)))


def own_app(*_: Any, **__: Any) -> Any:
    """In the place of Flower's loader: always the guarded ClientApp."""

    def load(*_: Any) -> ClientApp:
        return guarded_app.app

    return load


def main() -> None:
    """The executor of one joined node."""
    os.umask(OTHERS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    vars(clientapp).update(install_from_fab=checked_install, get_load_client_app_fn=own_app)
    executor.run(sys.argv[1], Path(guarded_app.node_folder().runtime_secret).read_bytes())


if __name__ == "__main__":
    main()
