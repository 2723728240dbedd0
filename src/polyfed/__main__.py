"""``python -m polyfed`` is the command ``polyfed``."""

from __future__ import annotations

from polyfed.cli.main import main

if __name__ == "__main__":
    main()
