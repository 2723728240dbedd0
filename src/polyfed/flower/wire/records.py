"""Convert wire messages to Flower records and back, with few arrays, because Flower fetches each array separately."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.flower.wire.lean_objects import pieces_of
from polyfed.flower.wire.message import BadMessage, Blob, WireMessage, read_control

CONTROL, TEXT, TENSORS = "polyfed", "control", "tensors"
STORED_AS, BYTES = "safetensors", "uint8"


def records_of(messages: Sequence[WireMessage]) -> list[RecordDict]:
    """Return the contents of Flower messages that are sent together. Flower chunks and hashes a shared blob once."""
    arrays: dict[int, Array] = {}
    contents = []
    for message in messages:
        content = RecordDict({CONTROL: ConfigRecord({TEXT: json.dumps(message.control)})})
        if message.blobs:
            content[TENSORS] = record = ArrayRecord()
            # Assigned one by one, because the constructor would copy the arrays, and each copy would be chunked and hashed again.
            for name, blob in message.blobs.items():
                if id(blob) not in arrays:
                    arrays[id(blob)] = _array(blob)
                record[name] = arrays[id(blob)]
        contents.append(content)
    return contents


def _array(blob: Blob) -> Array:
    data = blob[0] if len(blob) == 1 and isinstance(blob[0], bytes | bytearray) else b"".join(blob)
    array = Array(dtype=BYTES, shape=(len(data),), stype=STORED_AS, data=b"")
    # The constructor does not accept a bytearray.
    array.data = data
    return array


def wire_message_of(content: RecordDict) -> WireMessage:
    control = content.get(CONTROL)
    if not isinstance(control, ConfigRecord):
        raise BadMessage("polyfed did not write it")
    arrays = {str(name): array for record in content.array_records.values() for name, array in record.items()}
    if others := {array.stype for array in arrays.values()} - {STORED_AS}:
        raise BadMessage(f"an array has the format {min(map(repr, others))[:80]}")
    return WireMessage(read_control(control.get(TEXT)), {name: pieces_of(array) for name, array in arrays.items()})


def size_of(content: RecordDict) -> int:
    arrays = sum(len(piece) for record in content.array_records.values() for array in record.values() for piece in pieces_of(array))
    texts = sum(
        len(value) for record in content.config_records.values() for value in record.values() if isinstance(value, str | bytes)
    )
    return arrays + texts


def audited(content: RecordDict) -> dict[str, Any]:
    """Return what the audit log records about a message."""
    return {"bytes": size_of(content), "content": content_hash(content)}


def content_hash(content: RecordDict) -> str:
    """Return one SHA-256 over all records with their names, types and shapes; sender and receiver get the same."""
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
