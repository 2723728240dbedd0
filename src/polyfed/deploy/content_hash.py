"""One hash over the content of a Flower message: nodes write it down when something leaves, the server when it arrives."""

from __future__ import annotations

import hashlib

from flwr.app import Array, ArrayRecord, RecordDict

from polyfed.flower.lean_objects import pieces_of


def content_hash(content: RecordDict) -> str:
    """SHA-256 over all records with their names, types and shapes."""
    total = hashlib.sha256()
    for name in sorted(content):
        record = content[name]
        total.update(_part(name))
        for key in sorted(map(str, record)):
            value = record[key]
            total.update(_part(key))
            if isinstance(record, ArrayRecord) and isinstance(value, Array):
                pieces = pieces_of(value)
                total.update(_part(f"{value.dtype} {tuple(value.shape)} {value.stype} {sum(map(len, pieces))}"))
                for piece in pieces:
                    total.update(piece)
            else:
                total.update(_part(repr(value)))
    return total.hexdigest()


def _part(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data
