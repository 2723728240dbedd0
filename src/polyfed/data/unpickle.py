"""Reads published pickles without running anything that is in them.

CIFAR-10's batches and FedBN's parts are pickles, and a pickle can call any function by name. Here every
name but the few that rebuild numpy arrays is refused, and those few are replacements written below: not even
numpy's own code sees the content before it has been checked. Arrays of Python objects are refused.
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
    """The numpy arrays and plain containers in a pickle file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    return unpickled(content, str(path))


def unpickled(content: bytes, name: str) -> Any:
    """The numpy arrays and plain containers in a pickle; anything else is refused by name.

    Text of Python 2 is read as latin-1, which keeps its bytes.

    Args:
        content: The pickle.
        name: What to call it in messages.
    """
    try:
        return _finished(_Restricted(io.BytesIO(content), name).load())
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(
            f"{name} is not a pickle that can be read here: {error or type(error).__name__}. Get the file again."
        ) from error


class _Restricted(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, name: str) -> None:
        super().__init__(stream, encoding="latin1", errors="strict")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        admitted = _ADMITTED.get((module.replace("numpy.core.", "numpy._core."), name))
        if admitted is None:
            raise DataError(
                f"{self._name} asks for {module}.{name}, which was not run. "
                "Only numpy arrays of numbers or text and plain containers are read from a pickle."
            )
        return admitted

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(f"{self._name} refers to something outside itself, which is not followed.")


class _Admitted:
    """A name a pickle may call. It cannot be changed by the pickle, which could set attributes of a function."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DataError("A pickle tries to change what it may call; it was not run.")


class _ElementType:
    """Stands for a numpy dtype until the pickle has said its byte order."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMBERS_AND_TEXT.match(code):
            raise DataError(f"A pickle holds an array of type {code!r}; only numbers and text of fixed length are read.")
        self.code = code.lstrip("<>|=")

    def __setstate__(self, state: Any) -> None:
        plain = isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|", "=") and state[2:5] == (None,) * 3
        if not plain:
            raise DataError("A pickle holds an array with named fields or parts; only plain arrays are read.")
        self.code = state[1] + self.code.lstrip("<>|=")

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.code)


class _Array:
    """Stands for a numpy array until its content has been checked."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DataError("A pickle holds an array in a form that is not known; only plain arrays are read.")
        _, shape, elements, column_major, content = state
        self.value = _array(content, elements, shape, "F" if column_major is True else "C")


def _array(content: Any, elements: Any, shape: Any, order: Any) -> NDArray[Any]:
    if isinstance(content, str):
        content = content.encode("latin1")
    if not isinstance(elements, _ElementType) or not isinstance(content, bytes | bytearray):
        raise DataError(f"A pickle holds an array of Python objects ({type(content).__name__}); only numbers and text are read.")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape) or order not in ("C", "F"):
        raise DataError(f"A pickle holds an array of shape {shape!r}; sides must be whole numbers.")
    kind = elements.numpy()
    if math.prod(shape) * kind.itemsize != len(content):
        raise DataError(f"A pickle holds an array of shape {shape} and type {kind} in {len(content)} bytes, which does not fit.")
    # A copy: arrays that share the bytes of the pickle could not be written to.
    return np.frombuffer(bytes(content), kind).reshape(shape, order=order).copy()


def _empty(kind: Any, *_: Any) -> _Array:
    if kind is not _ADMITTED["numpy", "ndarray"]:
        raise DataError("A pickle builds an array of a kind of its own; only plain numpy arrays are read.")
    return _Array()


def _from_buffer(content: Any, elements: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.value = _array(content, elements, shape, order)
    return made


def _scalar(elements: Any, content: Any = b"") -> Any:
    return _array(content, elements, (), "C")[()]


def _bytes(text: Any, encoding: Any = None) -> bytes:
    """The bytes of Python 3 in an old pickle, which are written as latin-1 text; no other codec is run."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise DataError(f"A pickle asks for the codec {encoding!r}, which was not run; only latin1 is.")
    return text.encode("latin1")


def _no_bytes(*arguments: Any) -> bytes:
    """Empty bytes in an old pickle, which are written as a call without arguments."""
    if arguments:
        raise DataError("A pickle makes bytes out of something else, which was not run.")
    return b""


def _never(*_: Any) -> Any:
    raise DataError("A pickle builds an array by a way of its own; only plain numpy arrays are read.")


_ADMITTED: dict[tuple[str, str], _Admitted] = {
    ("numpy", "ndarray"): _Admitted(_never),
    ("numpy", "dtype"): _Admitted(_ElementType),
    ("numpy._core.multiarray", "_reconstruct"): _Admitted(_empty),
    ("numpy._core.multiarray", "scalar"): _Admitted(_scalar),
    ("numpy._core.numeric", "_frombuffer"): _Admitted(_from_buffer),
    ("_codecs", "encode"): _Admitted(_bytes),
    ("__builtin__", "bytes"): _Admitted(_no_bytes),
}


def _finished(value: Any) -> Any:
    """The value with every placeholder replaced by its array."""
    if isinstance(value, _Array):
        if value.value is None:
            raise DataError("A pickle holds an array without content.")
        return value.value
    if isinstance(value, _ElementType | _Admitted):
        raise DataError("A pickle holds a type or a function where data should be.")
    if isinstance(value, dict):
        return {_finished(key): _finished(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_finished(item) for item in value)
    return value
