"""Flower's built-in waits, shortened where its release allows it.

A SuperNode of flwr 1.41 that found no message sleeps 3 s, looks for its app's reply every 0.5 s, and, like a ServerApp, waits about 1 s
before it asks again for a part of a message that is still on its way. None of these has a setting, so the names below are replaced in
the modules that use them; where a release has other names, its own waits stay and a line in the log says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("polyfed")

NODE, SERVER = "flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid"
CLIENTAPP = "flwr.supernode.runtime.run_clientapp"
LOOK_FOR_MESSAGES = 0.5
"""Seconds between a node's questions to the server; each is a request over the network."""
LOOK_FOR_REPLIES = 0.05
"""Seconds between a node's looks for the reply of its own app, in its own memory."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 0.5
IDLE_SLEEP = 3


class ShorterSleep:
    """The module ``time`` with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Sleep at most as long as the two waits of a SuperNode should last."""
        time.sleep(min(seconds, LOOK_FOR_MESSAGES if seconds >= IDLE_SLEEP else LOOK_FOR_REPLIES))


def shorten_node() -> bool:
    """Shorten the waits of the SuperNode that runs in this process; False where this release of Flower has others."""
    return _replaced(NODE, "time", lambda _: ShorterSleep()) and _replaced(NODE, "pull_objects", _sooner)


def shorten_clientapp() -> bool:
    """Shorten the waits of ClientApps that run in this process: they start before their message has arrived."""
    return _replaced(CLIENTAPP, "pull_and_inflate_object_from_tree", _sooner)


def shorten_server() -> bool:
    """Shorten the waits of the ServerApp that runs in this process."""
    return _replaced(SERVER, "pull_objects", _sooner)


def _sooner(pull: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(pull, initial_backoff=FIRST_BACKOFF, backoff_cap=LONGEST_BACKOFF)


def _replaced(module: str, name: str, change: Callable[[Any], Any]) -> bool:
    try:
        place = importlib.import_module(module)
        before = getattr(place, name)
    except (ImportError, AttributeError):
        log.info("This release of Flower has no %s.%s: its own waits stay.", module, name)
        return False
    if not isinstance(before, ShorterSleep | functools.partial):
        setattr(place, name, change(before))
    return True
