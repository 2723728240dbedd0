"""polyfed: multi-domain federated learning in which a method is a value and methods add up."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Two names that are also files: importing the file first lets the name stand for what people want.
from polyfed.conversation import conversation as conversation
from polyfed.run import run as run

if TYPE_CHECKING:
    from polyfed.client import Client as Client
    from polyfed.client import Step as Step
    from polyfed.conversation import Ask as Ask
    from polyfed.conversation import Payload as Payload
    from polyfed.conversation import Reply as Reply
    from polyfed.data.federation import ArrayExamples as ArrayExamples
    from polyfed.data.federation import ClientData as ClientData
    from polyfed.data.federation import DataSet as DataSet
    from polyfed.data.federation import Domain as Domain
    from polyfed.data.federation import Federation as Federation
    from polyfed.errors import PolyfedError as PolyfedError
    from polyfed.method import Facts as Facts
    from polyfed.method import Method as Method
    from polyfed.method import parse as parse
    from polyfed.method import register as register
    from polyfed.observers import resume as resume
    from polyfed.opened import open_run as open_run
    from polyfed.rehearsal import estimate as estimate
    from polyfed.result import Result as Result
    from polyfed.server import Server as Server
    from polyfed.settings import Settings as Settings
    from polyfed.sharing import Rule as Rule
    from polyfed.sharing import Select as Select
    from polyfed.sharing import keep_local as keep_local
    from polyfed.sharing import reduce_with as reduce_with
    from polyfed.sharing import upload_only as upload_only
    from polyfed.testing import check_method as check_method

_HOMES = {
    "client": ("Client", "Step"),
    "conversation": ("Ask", "Payload", "Reply"),
    "data.federation": ("ArrayExamples", "ClientData", "DataSet", "Domain", "Federation"),
    "errors": ("PolyfedError",),
    "method": ("Facts", "Method", "parse", "register"),
    "observers": ("resume",),
    "opened": ("open_run",),
    "rehearsal": ("estimate",),
    "result": ("Result",),
    "server": ("Server",),
    "settings": ("Settings",),
    "sharing": ("Rule", "Select", "keep_local", "reduce_with", "upload_only"),
    "testing": ("check_method",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["conversation", "run", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``polyfed --help`` need not import torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'polyfed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"polyfed.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
