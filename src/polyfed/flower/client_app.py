"""The ClientApp: takes an ask, lets the node answer it, and gives the answer back.

Flower starts a process for every message. To import torch there would cost seconds each time, so this module imports neither torch nor
what needs it: it passes messages on to a resident process (``resident.py``), unless the node's configuration says ``resident=false``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from polyfed.flower.app_folder import settings_from
from polyfed.flower.parcel import Parcel
from polyfed.flower.records import Arrays, parcel_of

ACTION = "polyfed"


def make_app(work: Callable[[Parcel, Context], Parcel]) -> ClientApp:
    """A ClientApp that answers every ask in one way."""
    made = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        return Message(Arrays().records(work(parcel_of(message.content), context)), reply_to=message)

    for category in (made.train, made.evaluate, made.query):
        category(ACTION)(handle)
    return made


def answer(parcel: Parcel, context: Context) -> Parcel:
    """Answer an ask on a node of its own."""
    settings = settings_from(context.run_config)
    config = dict(context.node_config)
    if config.get("resident", True) in (False, "false"):
        from polyfed.flower.node import build_node

        return build_node(settings, config).answer(parcel)
    from polyfed.flower.resident import ask_resident

    return ask_resident(json.dumps(dataclasses.asdict(settings)), config, parcel)


app = make_app(answer)
