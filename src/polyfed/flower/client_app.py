"""The ClientApp: takes an ask, lets the node answer it, and gives the answer back.

Flower starts a process for every message. To import torch there would cost seconds each time, so this module imports neither torch nor
what needs it (``node.py`` only where it must): it passes messages on to a resident process (``resident.py``), unless the node's configuration says ``resident=false``.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from polyfed.flower.app import settings_from, settings_text
from polyfed.flower.node.resident import ask_resident
from polyfed.flower.wire.message import ACTION, WireMessage, refusal
from polyfed.flower.wire.records import records_of, wire_message_of
from polyfed.settings import Settings
from polyfed.trust import names_function

CODE = "code"


def problem_with_code(settings: Settings, config: Mapping[str, object]) -> str:
    """Why a node with this configuration does not run what an app brings; empty where it may."""
    listed = set(str(config.get(CODE, "")).replace(",", " ").lower().split())
    for file in _travelled(settings):
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found not in listed:
            return (
                f"This node does not list the code in {file.name} (SHA-256 {found}). Read the file; to let it run, start the node with "
                f"--node-config '{CODE}=\"{found}\"'."
            )
    return ""


def _travelled(settings: Settings) -> Iterator[Path]:
    """The files of code that came with the app."""
    yield from map(Path, settings.load)
    if settings.model is not None and names_function(settings.model):
        yield from _files_of(settings.model.partition(":")[0].partition(".")[0])


def _files_of(module: str) -> Iterator[Path]:
    """The files of a module or package that is not installed here."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = Path(__file__).resolve().parents[2]
    for place in filter(None, sys.path):
        folder = Path(place).resolve()
        found = [path for path in (folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))) if path.is_file()]
        if found:
            if folder not in (*installed, own):
                yield from found
            return


def app_with(handle: Callable[[Message, Context], Message]) -> ClientApp:
    """A ClientApp that answers every ask in one way."""
    made = ClientApp()
    for category in (made.train, made.evaluate, made.query):
        category(ACTION)(handle)
    return made


def make_app(work: Callable[[WireMessage, Context], WireMessage]) -> ClientApp:
    """The same, for a function of wire messages."""

    def handle(message: Message, context: Context) -> Message:
        answered = work(wire_message_of(message.content), context)
        return Message(records_of([answered])[0], reply_to=message)

    return app_with(handle)


def answer(wire_message: WireMessage, context: Context) -> WireMessage:
    settings = settings_from(context.run_config)
    config = dict(context.node_config)
    if config.get("resident", True) in (False, "false"):
        from polyfed.flower.node.node import build_node

        return build_node(settings, config).answer(wire_message)
    return ask_resident(settings_text(settings), config, wire_message)


def answer_with_listed_code(wire_message: WireMessage, context: Context) -> WireMessage:
    """Answer an ask, unless its app brings code that the node does not list."""
    problem = problem_with_code(settings_from(context.run_config), context.node_config)
    return refusal(problem) if problem else answer(wire_message, context)


app = make_app(answer_with_listed_code)
