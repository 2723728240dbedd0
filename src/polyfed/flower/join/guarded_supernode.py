"""The SuperNode of a joined node (``python -m``), which survives invalid app bundles."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from polyfed.flower import supernode
from polyfed.flower.join.bundle_check import read_bundle, read_project

log = logging.getLogger("polyfed")

ReadConfig = Callable[[bytes, Any], dict[str, Any]]


def _unless_unreadable(read: ReadConfig) -> ReadConfig:
    """Make Flower's function return an empty configuration for an invalid bundle, which the executor rejects later."""

    def config_in(bundle: bytes, run: Any) -> dict[str, Any]:
        try:
            read_project(read_bundle(bundle))
            return read(bundle, run)
        except Exception as error:
            # The node must survive any bundle.
            log.warning("An app bundle has no readable configuration (%s: %s).", type(error).__name__, error)
            return {}

    return config_in


def main() -> None:
    # A function with the same name hides the module.
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    vars(loop).update(get_fused_config_from_fab=_unless_unreadable(loop.get_fused_config_from_fab))
    try:
        supernode.main()
    except Exception:
        log.exception("The SuperNode ended.")
    # Flower's threads would keep the process alive; polyfed join restarts it when it exits.
    os._exit(1)


if __name__ == "__main__":
    main()
