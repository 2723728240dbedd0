"""Much freed memory that the C library keeps goes back to the system between two clients.

Steps on large images free and ask for blocks of some hundred megabytes, and what outlives a step lies between them: the gaps that are left
fit the next client's blocks less and less, so a process would grow with every client. Within a client's training nothing is given
back, since its next step needs the same blocks. Results are not touched by this.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MUCH = 256 << 20
"""Bytes that are kept without asking: they come back page by page, which a small step would feel."""


class _HeapFacts(ctypes.Structure):
    """What ``mallinfo2`` of the GNU C library tells, in its order."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keepcost")
    ]


@cache
def _library() -> Any:
    """The C library, where it can tell how much it keeps and give it back; None elsewhere."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _HeapFacts
    return library


def give_back_much() -> bool:
    """Give freed memory back if it is much; returns whether it was. Other C libraries than GNU's are left alone."""
    library = _library()
    if library is None or library.mallinfo2().free < MUCH:
        return False
    library.malloc_trim(0)
    return True
