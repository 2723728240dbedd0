"""The ClientApp: passes a request to the node and returns the node's reply.

Flower starts a process for every message. Importing torch in it would take seconds each time, so this module imports neither torch nor
modules that need it. It passes messages to a resident process (``resident.py``), unless the node configuration sets ``resident=false``.
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
    """Return the reason why this node does not run the app's code, or an empty string if it does."""
    listed = set(str(config.get(CODE, "")).replace(",", " ").lower().split())
    for file in _sent_files(settings):
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found not in listed:
            return (
                f"This node does not allow the code in {file.name} (SHA-256 {found}). Read the file; to allow it, start the node with "
                f"--node-config '{CODE}=\"{found}\"'."
            )
    return ""


def _sent_files(settings: Settings) -> Iterator[Path]:
    yield from map(Path, settings.load)
    if settings.model is not None and names_function(settings.model):
        yield from _files_of(settings.model.partition(":")[0].partition(".")[0])


def _files_of(module: str) -> Iterator[Path]:
    """Yield the files of a module or package, unless it is installed here."""
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
    """Return a ClientApp that handles every request with one function."""
    made = ClientApp()
    for category in (made.train, made.evaluate, made.query):
        category(ACTION)(handle)
    return made


def make_app(work: Callable[[WireMessage, Context], WireMessage]) -> ClientApp:
    def handle(message: Message, context: Context) -> Message:
        reply = work(wire_message_of(message.content), context)
        return Message(records_of([reply])[0], reply_to=message)

    return app_with(handle)


def answer(wire_message: WireMessage, context: Context) -> WireMessage:
    settings = settings_from(context.run_config)
    config = dict(context.node_config)
    if config.get("resident", True) in (False, "false"):
        from polyfed.flower.node.node import build_node

        return build_node(settings, config).answer(wire_message)
    return ask_resident(settings_text(settings), config, wire_message)


def answer_with_listed_code(wire_message: WireMessage, context: Context) -> WireMessage:
    """Reply to a request, unless its app contains code that the node does not allow."""
    problem = problem_with_code(settings_from(context.run_config), context.node_config)
    return refusal(problem) if problem else answer(wire_message, context)


app = make_app(answer_with_listed_code)
