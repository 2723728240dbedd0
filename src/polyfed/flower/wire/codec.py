"""Encode payloads as wire messages and decode them, bit-identical; entries and extras are separate safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from polyfed.core.rounds import Payload
from polyfed.flower.wire.message import BadMessage, Blob, WireMessage
from polyfed.trees import SAFETENSORS_NAMES, as_json, file_pieces, from_json

ENTRIES, EXTRAS = "entries", "extras"
COMPLEX = "complex"  # name prefix of complex tensors, which are sent as pairs of real numbers


class Encoder:
    """Encodes payloads. Tensors that several payloads share become the same blob."""

    def __init__(self) -> None:
        # Keep the tensors alive, so that no other tensor gets their ids.
        self.done: dict[tuple[tuple[str, int], ...], tuple[Mapping[str, Tensor], Blob]] = {}

    def encode(self, payload: Payload, control: Mapping[str, Any]) -> WireMessage:
        structures: dict[str, Any] = {}
        blobs: dict[str, Blob] = {}
        for group, values in ((ENTRIES, payload.entries), (EXTRAS, payload.extras)):
            tensors: dict[str, Tensor] = {}

            def name(value: Tensor, path: str, tensors: dict[str, Tensor] = tensors) -> str:
                reference = f"{COMPLEX}{path}" if value.is_complex() else path
                tensors[reference] = value
                return reference

            structures[group] = as_json(dict(values), name)
            if tensors:
                blobs[group] = self._blob(tensors)
        return WireMessage({**control, **structures}, blobs)

    def _blob(self, tensors: Mapping[str, Tensor]) -> Blob:
        key = tuple((name, id(value)) for name, value in tensors.items())
        if key not in self.done:
            # No copy: the pieces are joined, or written to a socket, before the tensors change.
            self.done[key] = tensors, file_pieces({name: _sendable(value) for name, value in tensors.items()})
        return self.done[key][1]


def _sendable(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    if value.dtype not in SAFETENSORS_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_NAMES)
        raise TypeError(f"Tensors of type {value.dtype} cannot be sent. Supported types: {known}, complex.")
    return value.contiguous()


def payload_of(message: WireMessage) -> Payload:
    entries = _group(message, ENTRIES)
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries.items()):
        raise BadMessage("its entries are not named tensors")
    return Payload(entries, extras_of(message))


def extras_of(message: WireMessage) -> dict[str, Any]:
    return _group(message, EXTRAS)


def _group(message: WireMessage, group: str) -> dict[str, Any]:
    tensors = read_tensors(message.blobs.get(group, ()))

    def take(reference: str) -> Tensor:
        value = tensors.pop(reference)
        return torch.view_as_complex(value) if reference.startswith(COMPLEX) else value

    try:
        values = from_json(message.control[group], take)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise BadMessage(f"its {group} cannot be decoded ({type(error).__name__}: {error})") from error
    if not isinstance(values, dict):
        raise BadMessage(f"its {group} are not a table")
    if tensors:
        raise BadMessage(f"its {group} do not use {len(tensors)} of its tensors")
    return values


def read_tensors(blob: Blob) -> dict[str, Tensor]:
    """Copy the tensors out of a blob, which must be a complete safetensors file."""
    if not blob:
        return {}
    try:
        tensors: dict[str, Tensor] = load_safetensors(b"".join(blob))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BadMessage(f"its tensors cannot be read ({type(error).__name__}: {error})") from error
    for value in tensors.values():
        if value.dtype not in SAFETENSORS_NAMES:
            raise BadMessage(f"its tensors have the type {value.dtype}")
        if value.dtype is torch.bool and bool((value.view(torch.uint8) > 1).any()):
            raise BadMessage("a Boolean is neither 0 nor 1")
    return tensors
