"""The SuperNode of a joined node: polyfed's, and no app bundle ends it.

    python -m polyfed.flower.join.guarded_supernode --superlink HOST:PORT ...

Flower reads the configuration of a run from its bundle here, before the executor looks at the bundle. One that cannot be read, or that is
not the one that was asked for, ended the loop of the SuperNode while its process stayed: the node was silent until somebody started it
again.
"""

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
    """Flower's function, which is given no bundle that is too large or cannot be read; the executor refuses those by name."""

    def config_in(bundle: bytes, run: Any) -> dict[str, Any]:
        try:
            read_project(read_bundle(bundle))
            return read(bundle, run)
        except Exception as error:
            # Whatever is in a bundle, the node must be there for the next one.
            log.warning("An app bundle has no configuration that can be read (%s: %s).", type(error).__name__, error)
            return {}

    return config_in


def main() -> None:
    # By its name: a function of the same name hides the module.
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    vars(loop).update(get_fused_config_from_fab=_unless_unreadable(loop.get_fused_config_from_fab))
    try:
        supernode.main()
    except Exception:
        log.exception("The SuperNode ended.")
    # Its loop has ended by an error. Threads of Flower's would hold the process, and polyfed join starts another when this one has gone.
    os._exit(1)


if __name__ == "__main__":
    main()
