"""Flower's array chunks without the work that Flower 1.41 does on them several times over.

An array travels in chunks of 5 MB. Flower copies and hashes each chunk again whenever its id is asked for, two or three times a message,
and copies it once more when it arrives. Chunks never change, so their ids may be remembered, and a view of what arrived is enough.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("polyfed")


def lean_chunks() -> bool:
    """Remember the ids of chunks in this process, and do not copy those that arrive; False where this release has others."""
    try:
        from flwr.app.message import arraychunk
        from flwr.supercore.inflatable.inflatable_object import HEAD_BODY_DIVIDER

        chunk, _ = arraychunk.ArrayChunk, arraychunk.get_object_body
    except (ImportError, AttributeError):
        log.info("This release of Flower has no array chunks as in 1.41: it handles them in its own way.")
        return False

    def body(content: bytes, cls: type[Any]) -> memoryview:
        head, found, _ = bytes(memoryview(content)[:LONGEST_HEAD]).partition(HEAD_BODY_DIVIDER)
        if not found or head.split(b" ")[0] != cls.__qualname__.encode():
            raise ValueError(f"A {cls.__qualname__} was expected.")
        return memoryview(content)[len(head) + len(HEAD_BODY_DIVIDER) :]

    chunk.is_dirty = property(lambda self: False)
    vars(arraychunk).update(get_object_body=body)
    return True


LONGEST_HEAD = 256
"""Bytes: a chunk has no children, so its head is its type and its length."""
