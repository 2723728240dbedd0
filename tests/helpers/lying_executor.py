"""The warm executor of a node that lies: it changes what the node says, as the file ``lies.json`` in the node's state folder tells it.

    python -m helpers.lying_executor 127.0.0.1:9094

``description`` in that file replaces values of the node's description; ``refusal`` replaces its answers to everything else. The file is
read for every message, so that one node can tell several lies, one run after the other. Without the file the node is honest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.flower import client_app, executor
from polyfed.flower.wire_message import DESCRIBE, WireMessage

LIES = "lies.json"
DESCRIPTION, REFUSAL = "description", "refusal"
honest = client_app.ask_resident


def lying(settings: str, config: Mapping[str, Any], wire_message: WireMessage) -> WireMessage:
    """In the place of what passes messages on to the resident process."""
    answered = honest(settings, config, wire_message)
    file = Path(config["state"]) / LIES
    lies: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if wire_message.control.get("what") != DESCRIBE:
        return WireMessage(lies[REFUSAL]) if REFUSAL in lies else answered
    description = {**answered.control[DESCRIPTION], **lies.get(DESCRIPTION, {})}
    return WireMessage({**answered.control, DESCRIPTION: description})


if __name__ == "__main__":
    client_app.ask_resident = lying
    executor.main()
