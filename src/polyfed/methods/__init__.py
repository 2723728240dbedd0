"""One file per method, part or family of siblings. Importing the folder registers them all, so there is no list to maintain.

polyfed declares this folder as an entry point of the group ``polyfed.methods``, as any package with methods of its own may.
"""

from __future__ import annotations

from polyfed.registry import import_all

import_all(__name__)
