"""Reads published pickles without running anything that is in them.

CIFAR-10's batches and FedBN's parts are pickles, and a pickle can call any function by name. Here every
name but the few that rebuild numpy arrays is refused, and those few are replacements written below: not even
numpy's own code sees the content before it has been checked. Arrays of Python objects are refused, and so are pickles
that would become much larger than their file.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import DataError

_NUMBERS_AND_TEXT = re.compile(r"^[<>|=]?(\?|[biuf][1248]?|f16|[SUa]\d+)$")
LARGER_BY = 4
"""Arrays may take this many times the bytes of their file: text of old protocols is written with up to four bytes for one."""
_PLAIN_KEYS = (str, bytes, int, float, bool, type(None))
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
        return _Finishing(name, LARGER_BY * len(content)).finished(_Restricted(io.BytesIO(content), name).load())
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(
            f"{name} is not a pickle that can be read here: {error or type(error).__name__}. Get the file again."
        ) from error


def _require_plain(keys: Iterable[Any]) -> None:
    """Refuse keys other than numbers and text: the hash of nested tuples that share their parts takes for ever."""
    for key in keys:
        if not isinstance(key, _PLAIN_KEYS):
            raise DataError(f"A pickle uses {type(key).__name__} as a key; only numbers and text are read.")


def _set_item(unpickler: Any) -> None:
    _require_plain(unpickler.stack[-2:-1])
    pickle._Unpickler.load_setitem(unpickler)  # type: ignore[attr-defined]


def _set_items(unpickler: Any) -> None:
    _require_plain(unpickler.stack[::2])
    pickle._Unpickler.load_setitems(unpickler)  # type: ignore[attr-defined]


def _dict(unpickler: Any) -> None:
    _require_plain(unpickler.stack[::2])
    pickle._Unpickler.load_dict(unpickler)  # type: ignore[attr-defined]


def _add_items(unpickler: Any) -> None:
    _require_plain(unpickler.stack)
    pickle._Unpickler.load_additems(unpickler)  # type: ignore[attr-defined]


def _frozenset(unpickler: Any) -> None:
    _require_plain(unpickler.stack)
    pickle._Unpickler.load_frozenset(unpickler)  # type: ignore[attr-defined]


class _Restricted(pickle._Unpickler):
    """The unpickler written in Python, since the other one uses keys before anybody can look at them."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _dict,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozenset,
    }

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

    __slots__ = ("view",)

    def __init__(self) -> None:
        self.view: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DataError("A pickle holds an array in a form that is not known; only plain arrays are read.")
        _, shape, elements, column_major, content = state
        self.view = _array(content, elements, shape, "F" if column_major is True else "C")


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
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _empty(kind: Any, *_: Any) -> _Array:
    if kind is not _ADMITTED["numpy", "ndarray"]:
        raise DataError("A pickle builds an array of a kind of its own; only plain numpy arrays are read.")
    return _Array()


def _from_buffer(content: Any, elements: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.view = _array(content, elements, shape, order)
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


class _Finishing:
    """Replaces every placeholder by its array. What stands in several places is made once, or a few lists could become billions."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name, self._bytes_left = name, most_bytes
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()

    def finished(self, value: Any) -> Any:
        """The value without placeholders."""
        if isinstance(value, _Array):
            return self._copied(value)
        if isinstance(value, _ElementType | _Admitted):
            raise DataError("A pickle holds a type or a function where data should be.")
        if not isinstance(value, dict | list | tuple | set | frozenset):
            return value
        if id(value) in self._open:
            raise DataError(f"{self._name} holds a list that is a part of itself.")
        if id(value) not in self._made:
            self._open.add(id(value))
            self._made[id(value)] = self._container(value)
            self._open.remove(id(value))
        return self._made[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.finished(item) for key, item in value.items()}
        return type(value)(self.finished(item) for item in value)

    def _copied(self, array: _Array) -> NDArray[Any]:
        """A copy: arrays that share the bytes of the pickle could not be written to."""
        if array.view is None:
            raise DataError("A pickle holds an array without content.")
        self._bytes_left -= array.view.nbytes
        if self._bytes_left < 0:
            raise DataError(
                f"The arrays in {self._name} take more than {LARGER_BY} times the bytes of the file; they were not made."
            )
        return array.view.copy()
