"""Trees of plain values and tensors: as JSON with tensors beside it, as the bytes of a safetensors file, copied, measured, hashed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

SAFETENSORS_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Piece: TypeAlias = "bytes | memoryview"


def flattened(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Part a tree of plain values and tensors into JSON with references, and named tensors."""
    if isinstance(tree, Tensor):
        return {"tensor": path}, {path: tree.detach().contiguous()}
    if isinstance(tree, Mapping):
        pairs = [(flattened(key)[0], *flattened(value, f"{path}/{index}")) for index, (key, value) in enumerate(tree.items())]
        return {"map": [[key, value] for key, value, _ in pairs]}, {n: t for _, _, tensors in pairs for n, t in tensors.items()}
    if isinstance(tree, list | tuple):
        items = [flattened(value, f"{path}/{index}") for index, value in enumerate(tree)]
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [item for item, _ in items]}, {n: t for _, tensors in items for n, t in tensors.items()}
    return {"value": plain(tree)}, {}


def plain(value: Any) -> Any:
    """The same value, if it is one that can be written down."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"Memory may hold tensors, numbers, text, and lists and dicts of them; found {type(value).__name__}.")


def rebuilt(json_tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that ``flattened`` parted."""
    ((kind, inner),) = json_tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "map":
        return {rebuilt(key, tensors): rebuilt(value, tensors) for key, value in inner}
    if kind == "list":
        return [rebuilt(item, tensors) for item in inner]
    if kind == "tuple":
        return tuple(rebuilt(item, tensors) for item in inner)
    return inner


def packed(tree: Any) -> bytes:
    """A tree as the bytes of one safetensors file."""
    return b"".join(pieces(tree))


def pieces(tree: Any) -> list[Piece]:
    """A tree as the bytes of one safetensors file, in pieces: tensors are not copied, their memory is looked at where it lies."""
    json_tree, tensors = flattened(tree)
    metadata = {"tree": json.dumps(json_tree)}
    if sys.byteorder == "big" or any(value.dtype not in SAFETENSORS_NAMES for value in tensors.values()):
        return [save_safetensors({name: value.clone() for name, value in tensors.items()}, metadata)]
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": SAFETENSORS_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(raw(value) for _, value in ordered if value.numel())]


def raw(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data


def unpacked(data: bytes) -> Any:
    """The tree in the bytes of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return rebuilt(json.loads(header["__metadata__"]["tree"]), load_safetensors(data))


def own(tree: Any) -> Any:
    """The same tree with tensors of its own: later training cannot change it."""
    if isinstance(tree, Tensor):
        return tree.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        return {key: own(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [own(value) for value in tree]
        return values if isinstance(tree, list) else tuple(values)
    return plain(tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def size(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(value.nbytes for value in tensors_in(tree))


def tree_digest(tree: Any) -> str:
    """A hash of plain values and tensors."""
    json_tree, tensors = flattened(tree)
    total = hashlib.sha256(json.dumps(json_tree, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(raw(value))
    return total.hexdigest()
