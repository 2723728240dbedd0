"""polyfed: compare, train and deploy federated learning methods across domains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyfed.api import evaluate as evaluate
from polyfed.api import export as export
from polyfed.api import open_run as open_run
from polyfed.api import predict as predict
from polyfed.api import resume as resume
from polyfed.api import run as run

# api.py and api_studies.py import nothing heavy.
from polyfed.api_studies import analyse as analyse
from polyfed.api_studies import compare as compare
from polyfed.api_studies import doctor as doctor
from polyfed.api_studies import estimate as estimate
from polyfed.api_studies import report as report
from polyfed.api_studies import reproduce as reproduce
from polyfed.api_studies import sweep as sweep

if TYPE_CHECKING:
    from polyfed.core.client import Client as Client
    from polyfed.core.client import Step as Step
    from polyfed.core.data_types import ArrayExamples as ArrayExamples
    from polyfed.core.data_types import ClientData as ClientData
    from polyfed.core.data_types import DataSet as DataSet
    from polyfed.core.data_types import Domain as Domain
    from polyfed.core.data_types import Federation as Federation
    from polyfed.core.method import Facts as Facts
    from polyfed.core.method import Method as Method
    from polyfed.core.method import parse as parse
    from polyfed.core.method import register as register
    from polyfed.core.part import Part as Part
    from polyfed.core.part import declare as declare
    from polyfed.core.replies import RequestContext as RequestContext
    from polyfed.core.replies import planned_uploads as planned_uploads
    from polyfed.core.rounds import Payload as Payload
    from polyfed.core.rounds import Reply as Reply
    from polyfed.core.rounds import Request as Request
    from polyfed.core.rounds import exchange as exchange
    from polyfed.core.server import Server as Server
    from polyfed.core.sharing import Rule as Rule
    from polyfed.core.sharing import Select as Select
    from polyfed.core.sharing import keep_local as keep_local
    from polyfed.core.sharing import reduce_with as reduce_with
    from polyfed.core.sharing import upload_only as upload_only
    from polyfed.errors import PolyfedError as PolyfedError
    from polyfed.extras import Array as Array
    from polyfed.extras import Flag as Flag
    from polyfed.extras import LikeEntries as LikeEntries
    from polyfed.extras import ListOf as ListOf
    from polyfed.extras import MappingOf as MappingOf
    from polyfed.extras import Number as Number
    from polyfed.extras import Record as Record
    from polyfed.extras import Text as Text
    from polyfed.runs.callbacks.callback import Callback as Callback
    from polyfed.runs.result import Result as Result
    from polyfed.settings import Settings as Settings
    from polyfed.studies.report.comparison import Comparison as Comparison
    from polyfed.testing import check_method as check_method

_MODULES = {
    "core.client": ("Client", "Step"),
    "core.data_types": ("ArrayExamples", "ClientData", "DataSet", "Domain", "Federation"),
    "extras": ("Array", "Flag", "LikeEntries", "ListOf", "MappingOf", "Number", "Record", "Text"),
    "core.method": ("Facts", "Method", "parse", "register"),
    "core.part": ("Part", "declare"),
    "core.replies": ("RequestContext", "planned_uploads"),
    "core.rounds": ("Request", "Payload", "Reply", "exchange"),
    "core.server": ("Server",),
    "core.sharing": ("Rule", "Select", "keep_local", "reduce_with", "upload_only"),
    "studies.doctor.examine": ("Diagnosis",),
    "errors": ("PolyfedError",),
    "studies.report.comparison": ("Comparison",),
    "runs.callbacks.callback": ("Callback",),
    "runs.result": ("Result",),
    "settings": ("Settings",),
    "testing": ("check_method",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_FUNCTIONS = (
    *("analyse", "compare", "doctor", "estimate", "evaluate", "export", "open_run"),
    *("predict", "report", "reproduce", "resume", "run", "sweep"),
)

__all__ = [*_FUNCTIONS, *sorted(_MODULE_OF)]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``polyfed --help`` does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'polyfed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"polyfed.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
