"""Keep freed memory in the process, so that the next training step can use it.

With 14 million parameters, a training step frees and allocates several hundred megabytes. By default, glibc returns large blocks to the
kernel immediately, and each page is zeroed and mapped again. The page faults take a tenth of the training time. Results do not change.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
LARGEST_INT = 2**31 - 1
PAD_BYTES = 64 << 20


def keep_freed_pages() -> bool:
    """Configure glibc to keep freed memory; return False for other C libraries, which are not changed."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    options = ((MMAP_MAX, 0), (TRIM_THRESHOLD, LARGEST_INT), (TOP_PAD, PAD_BYTES))
    accepted = [library.mallopt(option, value) == 1 for option, value in options]
    return all(accepted)
