"""Shorten Flower's built-in waits.

A SuperNode of flwr 1.41 sleeps 3 s if there is no message, polls for its app's reply every 0.5 s, and, like a ServerApp, waits about 1 s
before it retries a missing part of a message. Flower has no settings for these waits, so this module patches the functions that wait.
The waits of a release with other functions are kept, and the log reports it.
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
LOOK_FOR_MESSAGES = 0.5  # seconds between a node's polls of the server
LOOK_FOR_REPLIES = 0.05  # seconds between a node's polls for its app's reply, which is in memory
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 0.5
IDLE_SLEEP = 3


class ShorterSleep:
    """Replacement for the module ``time``, with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, LOOK_FOR_MESSAGES if seconds >= IDLE_SLEEP else LOOK_FOR_REPLIES))


def shorten_node() -> bool:
    """Shorten the waits of the SuperNode in this process. Return False if this Flower release differs."""
    return _replace(NODE, "time", lambda _: ShorterSleep()) and _replace(NODE, "pull_objects", _with_shorter_waits)


def shorten_clientapp() -> bool:
    """Shorten the waits of ClientApps in this process, which start before their message is complete."""
    return _replace(CLIENTAPP, "pull_and_inflate_object_from_tree", _with_shorter_waits)


def shorten_server() -> bool:
    return _replace(SERVER, "pull_objects", _with_shorter_waits)


def _with_shorter_waits(pull: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(pull, initial_backoff=FIRST_BACKOFF, backoff_cap=LONGEST_BACKOFF)


def _replace(module: str, name: str, change: Callable[[Any], Any]) -> bool:
    try:
        place = importlib.import_module(module)
        before = getattr(place, name)
    except (ImportError, AttributeError):
        log.info("This Flower release has no %s.%s, so its waits are not shortened.", module, name)
        return False
    if not isinstance(before, ShorterSleep | functools.partial):
        setattr(place, name, change(before))
    return True
