"""Much freed memory that the C library keeps goes back to the system between two clients.

Steps on large images free and ask for blocks of some hundred megabytes, and what outlives a step lies between them: the gaps that are left
fit the next client's blocks less and less, so a process would grow with every client. Within a client's training nothing is given
back, since its next step needs the same blocks. Results are not touched by this.
"""

from __future__ import annotations

import ctypes
import sys
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
    """The C library of Linux; None elsewhere, where it cannot be asked for in this way."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapFacts
    return library


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_much() -> bool:
    """Give freed memory back if it is much; returns whether it was. Other C libraries than GNU's are left alone."""
    heap = getattr(_library(), "mallinfo2", None)
    if heap is None or heap().free < MUCH:
        return False
    give_back()
    return True
