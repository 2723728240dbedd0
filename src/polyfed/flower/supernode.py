"""``flower-supernode``, polling for messages every 0.5 s instead of every 3 s, with the same options.

python -m polyfed.flower.supernode --superlink HOST:PORT ...
"""

from __future__ import annotations

import importlib

from polyfed.flower.wire.direct_http import send_directly
from polyfed.flower.wire.local_objects import offer_objects
from polyfed.flower.wire.waits import shorten_node
from polyfed.runs.malloc import keep_freed_pages


def main() -> None:
    keep_freed_pages()
    shorten_node()
    send_directly()
    # In flwr.supernode.cli, a function with the same name hides the module.
    program = importlib.import_module("flwr.supernode.cli.flower_supernode")
    offer_objects(program)
    program.flower_supernode()


if __name__ == "__main__":
    main()
