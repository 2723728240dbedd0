"""Read published pickles without running any code in them.

CIFAR-10's batches and FedBN's parts are pickles, and a pickle can call any function by name. Only the names in ``_ALLOWED`` are
accepted. Each maps to a function below that checks shape, type and content before NumPy receives them.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import DataError

_NUMBERS_AND_TEXT = re.compile(r"^[<>|=]?(\?|[biuf][1248]?|f16|[SUa]\d+)$")
LARGER_BY = 4
"""Largest size of all arrays relative to the file. Old protocols write a byte as up to four bytes of text."""
_PLAIN = (str, bytes, int, float, type(None), np.ndarray, np.generic)
_BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def read_pickle(path: Path) -> Any:
    """Return the NumPy arrays and plain containers in a pickle file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    return unpickled(content, str(path))


def unpickled(content: bytes, name: str) -> Any:
    """Return the NumPy arrays and plain containers in a pickle, and reject everything else.

    Python 2 text is decoded as latin-1, which preserves its bytes. ``name`` is for error messages.
    """
    try:
        found = _Restricted(content, name).load()
        _require_plain(found)
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"{name} is not a readable pickle: {error or type(error).__name__}. Download the file again.") from error
    return found


class _Restricted(pickle._Unpickler):
    """The pure-Python unpickler. The C version would allocate as much memory as a number in the pickle specifies."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1", errors="strict")
        self.name, self.bytes_left = name, LARGER_BY * len(content)

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module.replace("numpy.core.", "numpy._core."), name))
        if allowed is None:
            raise DataError(
                f"{self.name} refers to {module}.{name}, which was not run. "
                "Only NumPy arrays of numbers or text, and plain containers, are loaded from pickle files."
            )
        # Return a new function each time, because a pickle can set attributes of what it may call.
        return lambda *arguments: allowed(self, *arguments)

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(f"{self.name} refers to external objects, which are not loaded.")

    def take(self, count: int) -> None:
        """Deduct allocated bytes from the limit. Without it, data that is used many times could fill the memory."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise DataError(f"The arrays in {self.name} need more than {LARGER_BY} times the size of the file and were not loaded.")


class _ElementType:
    """Represents a NumPy dtype until the pickle sets its byte order."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        plain = isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|", "=") and state[2:5] == (None,) * 3
        if not plain:
            raise DataError("A pickle contains an array with named fields or subarrays; only plain arrays are loaded.")
        self.code = state[1] + self.code


class _Array(np.ndarray):
    """An empty array until the pickle sets its content, which is checked before NumPy receives it."""

    unpickler: _Restricted

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DataError("A pickle contains an array in an unknown form; only plain arrays are loaded.")
        _, shape, elements, column_major, content = state
        content, kind = _checked(self.unpickler, content, elements, shape)
        super().__setstate__((1, shape, kind, column_major is True, content))  # type: ignore[arg-type]


def _checked(unpickler: _Restricted, content: Any, elements: Any, shape: Any) -> tuple[bytes, np.dtype[Any]]:
    """Return the bytes and the type of an array after checking that they fit its shape."""
    if isinstance(content, str):
        content = content.encode("latin1")
    if not isinstance(elements, _ElementType) or not isinstance(content, bytes | bytearray):
        raise DataError(
            f"A pickle contains an array of Python objects ({type(content).__name__}); only numbers and text are loaded."
        )
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise DataError(f"A pickle contains an array of shape {shape!r}; sides must be non-negative integers.")
    kind = np.dtype(elements.code)
    if math.prod(shape) * kind.itemsize != len(content):
        raise DataError(f"A pickle contains an array of shape {shape} and type {kind} in {len(content)} bytes, which does not fit.")
    unpickler.take(len(content))
    return bytes(content), kind


def _empty(unpickler: _Restricted, *_: Any) -> _Array:
    array = np.empty(0, np.uint8).view(_Array)
    array.unpickler = unpickler
    return array


def _from_buffer(unpickler: _Restricted, content: Any, elements: Any, shape: Any, order: Any) -> NDArray[Any]:
    content, kind = _checked(unpickler, content, elements, shape)
    return np.frombuffer(content, kind).reshape(shape, order="F" if order == "F" else "C").copy(order="K")


def _scalar(unpickler: _Restricted, elements: Any, content: Any = b"") -> Any:
    return _from_buffer(unpickler, content, elements, (), "C")[()]


def _dtype(unpickler: _Restricted, code: Any, *_: Any) -> _ElementType:
    if not isinstance(code, str) or not _NUMBERS_AND_TEXT.match(code):
        raise DataError(f"A pickle contains an array of type {code!r}; only numbers and text of fixed length are loaded.")
    return _ElementType(code.lstrip("<>|="))


def _bytes(unpickler: _Restricted, text: Any, encoding: Any = None) -> bytes:
    """Decode Python 3 bytes in an old pickle, which are written as latin-1 text. No other codec is run."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise DataError(f"A pickle refers to the codec {encoding!r}, which was not run. Only latin1 is allowed.")
    unpickler.take(len(text))
    return text.encode("latin1")


def _no_bytes(unpickler: _Restricted, *arguments: Any) -> bytes:
    """Return empty bytes, which an old pickle writes as a call without arguments."""
    if arguments:
        raise DataError("A pickle calls bytes with arguments, which was not run.")
    return b""


def _reject_constructor(unpickler: _Restricted, *_: Any) -> Any:
    raise DataError("A pickle builds an array with a custom constructor; only plain NumPy arrays are loaded.")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _reject_constructor,
    ("numpy", "dtype"): _dtype,
    ("numpy._core.multiarray", "_reconstruct"): _empty,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _bytes,
    ("__builtin__", "bytes"): _no_bytes,
}


def _require_plain(found: Any) -> None:
    """Reject types and functions. Shared values are visited once."""
    pending, seen = [found], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            pending += value
        elif not isinstance(value, _PLAIN):
            raise DataError("A pickle contains a type or a function instead of data.")
