"""The ClientApp: takes an ask, lets the node answer it, and gives the answer back.

Flower starts a process for every message. To import torch there would cost seconds each time, so this module imports neither torch nor
what needs it (``node.py`` only where it must): it passes messages on to a resident process (``resident.py``), unless the node's configuration says ``resident=false``.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from polyfed.flower.listed_code import problem_with_code
from polyfed.flower.records import records_of, wire_message_of
from polyfed.flower.resident import ask_resident
from polyfed.flower.run_config import settings_from, settings_text
from polyfed.flower.wire_message import ACTION, WireMessage, refusal


def make_app(work: Callable[[WireMessage, Context], WireMessage]) -> ClientApp:
    """A ClientApp that answers every ask in one way."""
    made = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        answered = work(wire_message_of(message.content), context)
        return Message(records_of([answered])[0], reply_to=message)

    for category in (made.train, made.evaluate, made.query):
        category(ACTION)(handle)
    return made


def answer(wire_message: WireMessage, context: Context) -> WireMessage:
    """Answer an ask on a node of its own."""
    settings = settings_from(context.run_config)
    config = dict(context.node_config)
    if config.get("resident", True) in (False, "false"):
        from polyfed.flower.node import build_node

        return build_node(settings, config).answer(wire_message)
    return ask_resident(settings_text(settings), config, wire_message)


def answer_with_listed_code(wire_message: WireMessage, context: Context) -> WireMessage:
    """Answer an ask, unless its app brings code that the node does not list."""
    problem = problem_with_code(settings_from(context.run_config), context.node_config)
    return refusal(problem) if problem else answer(wire_message, context)


app = make_app(answer_with_listed_code)
