"""``flower-supernode`` with shorter waits: it looks for messages every 0.5 s instead of every 3 s.

    python -m polyfed.flower.supernode --superlink HOST:PORT ...

It takes the options of ``flower-supernode`` and runs Flower's own program.
"""

from __future__ import annotations

from flwr.supernode.cli.flower_supernode import flower_supernode

from polyfed.flower.direct_http import send_directly
from polyfed.flower.waits import shorten_node


def main() -> None:
    """A SuperNode."""
    shorten_node()
    send_directly()
    flower_supernode()


if __name__ == "__main__":
    main()
