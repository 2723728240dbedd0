"""The warm executor of a node that lies: it changes what the node says, as the file ``lies.json`` in the node's state folder tells it.

    python -m helpers.lying_executor 127.0.0.1:9094

``description`` in that file replaces values of the node's description, ``odd`` names a change of ``helpers/odd_descriptions.py``;
``refusal`` replaces its answers to everything else, and ``parts`` lets their arrays name chunks that they do not have. The file is read
for every message, so that one node can tell several lies, one run after the other. Without the file the node is honest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array

from helpers.odd_descriptions import ODD_NODES
from polyfed.flower import client_app, executor
from polyfed.flower.wire.message import DESCRIBE, WireMessage

LIES = "lies.json"
DESCRIPTION, REFUSAL, ODD, PARTS = "description", "refusal", "odd", "parts"
honest = client_app.ask_resident
sent = Array.deflate


def without_its_chunks(array: Array) -> bytes:
    """An array that names its eighth chunk and has one; no longer than what Flower writes, since the head tells the length."""
    return sent(array).replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [7]')


def lying(settings: str, config: Mapping[str, Any], wire_message: WireMessage) -> WireMessage:
    """In the place of what passes messages on to the resident process."""
    answered = honest(settings, config, wire_message)
    file = Path(config["state"]) / LIES
    lies: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if wire_message.control.get("what") != DESCRIBE:
        if lies.get(PARTS):
            Array.deflate = without_its_chunks  # type: ignore[method-assign]
        return WireMessage(lies[REFUSAL]) if REFUSAL in lies else answered
    if ODD in lies:
        return WireMessage({**answered.control, DESCRIPTION: ODD_NODES[lies[ODD]][0](answered.control[DESCRIPTION])})
    description = {**answered.control[DESCRIPTION], **lies.get(DESCRIPTION, {})}
    return WireMessage({**answered.control, DESCRIPTION: description})


if __name__ == "__main__":
    client_app.ask_resident = lying
    executor.run(sys.argv[1])
