"""Functions for trees (mappings, lists and tuples) of plain values and tensors, including storage as a safetensors file."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

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
T = TypeVar("T")


def map_leaves(tree: T, change: Callable[[Any], Any]) -> T:
    """Apply a function to every leaf of a tree: every value except mappings, lists and tuples. Keys do not change."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, change) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list | tuple):
        values = [map_leaves(value, change) for value in tree]
        return values if isinstance(tree, list) else tuple(values)  # type: ignore[return-value]
    return change(tree)  # type: ignore[no-any-return]


def map_tensors(tree: T, change: Callable[[Tensor], Any]) -> T:
    """Apply a function to every tensor of a tree."""
    return map_leaves(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def leaves_in(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves_in(value)
    else:
        yield tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_in(tree) if isinstance(leaf, Tensor))


def as_json(tree: Any, reference: Callable[[Tensor, str], Any], path: str = "") -> Any:
    """Convert a tree to JSON, with references instead of tensors.

    Args:
        tree: Tree of plain values and tensors.
        reference: Returns the reference for a tensor and its path in the tree.
        path: Path of the root.
    """
    if isinstance(tree, Tensor):
        return {"tensor": reference(tree, path)}
    if isinstance(tree, Mapping):
        pairs = enumerate(tree.items())
        return {"map": [[as_json(key, reference), as_json(value, reference, f"{path}/{index}")] for index, (key, value) in pairs]}
    if isinstance(tree, list | tuple):
        items = [as_json(value, reference, f"{path}/{index}") for index, value in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    return {"value": plain(tree)}


def plain(value: Any) -> Any:
    """Return a value unchanged if it can be written as JSON, otherwise raise an error."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"Messages and memory can contain tensors, numbers, text, and lists and dicts of these; got {type(value).__name__}."
    )


def from_json(json_tree: Any, tensor: Callable[[Any], Tensor]) -> Any:
    """Convert the output of ``as_json`` back to a tree. ``tensor`` returns the tensor for a reference."""
    ((kind, inner),) = json_tree.items()
    if kind == "tensor":
        return tensor(inner)
    if kind == "map":
        return {from_json(key, tensor): from_json(value, tensor) for key, value in inner}
    if kind == "list":
        return [from_json(item, tensor) for item in inner]
    if kind == "tuple":
        return tuple(from_json(item, tensor) for item in inner)
    return inner


def flattened(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into JSON with references, and named tensors."""
    tensors: dict[str, Tensor] = {}

    def named(value: Tensor, path: str) -> str:
        tensors[path] = value.detach().contiguous()
        return path

    return as_json(tree, named), tensors


def rebuilt(json_tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Join the output of ``flattened`` to a tree."""
    return from_json(json_tree, tensors.__getitem__)


def packed(tree: Any) -> bytes:
    """Return the bytes of a safetensors file with the tree."""
    return b"".join(pieces(tree))


def pieces(tree: Any) -> list[Piece]:
    """Return the bytes of a safetensors file with the tree, in pieces."""
    json_tree, tensors = flattened(tree)
    return file_pieces(tensors, {"tree": json.dumps(json_tree)})


def file_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Piece]:
    """Return the bytes of a safetensors file with contiguous tensors, in pieces. The tensors are not copied."""
    if sys.byteorder == "big" or any(value.dtype not in SAFETENSORS_NAMES for value in tensors.values()):
        return [save_safetensors({name: value.clone() for name, value in tensors.items()}, dict(metadata or {}))]
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # aligns every tensor
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": SAFETENSORS_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(raw(value) for _, value in ordered if value.numel())]


def raw(value: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data


def unpacked(data: bytes) -> Any:
    """Read a tree from the bytes of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return rebuilt(json.loads(header["__metadata__"]["tree"]), load_safetensors(data))


def own(tree: T) -> T:
    """Copy a tree and its tensors, so that later training cannot change them."""

    def own_leaf(leaf: Any) -> Any:
        return leaf.detach().clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else plain(leaf)

    return map_leaves(tree, own_leaf)


def size(tree: Any) -> int:
    """Return the total size of all tensors in bytes."""
    return sum(value.nbytes for value in tensors_in(tree))


def tree_digest(tree: Any) -> str:
    json_tree, tensors = flattened(tree)
    total = hashlib.sha256(json.dumps(json_tree, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(raw(value))
    return total.hexdigest()
