"""Published pickles are read, and nothing in a hostile one is run."""

from __future__ import annotations

import builtins
import codecs
import functools
import itertools
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from polyfed.data.formats.unpickle import read_pickle, unpickled
from polyfed.errors import DataError


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "column_major": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    "big_endian": np.array([1, 2, 300], ">i4"),
    "floats": np.array([[0.5, -2.0]], np.float32),
    "flags": np.array([True, False]),
    "text": np.array(["amazon/a.jpg", "b"]),
    "empty": np.empty((0, 3), np.uint8),
    "single": np.array(7),
}


def test_arrays_come_back():
    for name, protocol in itertools.product(ARRAYS, range(pickle.HIGHEST_PROTOCOL + 1)):
        content = pickle.dumps(ARRAYS[name], protocol)
        expected, found = pickle.loads(content), unpickled(content, "x")
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, protocol)
        assert (found == expected).all() and found.flags.writeable, (name, protocol)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_containers_and_scalars_come_back(protocol):
    shared = np.arange(3)
    value = {
        "a": [1, 2.5, None, True, "ä"],
        "b": (np.float64(0.25), np.int32(-3)),
        "pixels": (np.eye(2), [np.zeros(1)]),
        "raw": b"\xff\x00",
        "shared": (shared, shared),
    }
    found = unpickled(pickle.dumps(value, protocol), "x")
    assert found["a"] == value["a"]
    assert found["raw"] == value["raw"]
    assert found["b"] == (0.25, -3)
    assert type(found["b"][1]) is np.int32
    assert (found["pixels"][0] == np.eye(2)).all()
    assert (found["pixels"][1][0] == 0).all()
    assert (found["shared"][0] == found["shared"][1]).all()


def test_a_batch_as_python_2_wrote_it():
    """CIFAR-10's batches: text of Python 2 for keys and for the array's content, names of old numpy."""
    content = (
        b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\x01K\x02\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x02\x00\xfftbU\x06labels]K\x06au."
    )
    found = unpickled(content, "data_batch_1")
    assert found["labels"] == [6]
    assert found["data"].tolist() == [[0, 255]]


@pytest.mark.parametrize("spelling", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_old_and_new_names_of_numpy(spelling):
    content = pickle.dumps(np.arange(4), 2).replace(b"numpy._core.multiarray", spelling)
    assert unpickled(content, "x").tolist() == [0, 1, 2, 3]


HOSTILE = {
    "os.system": Calls(os.system, "touch harmed"),
    "builtins.eval": Calls(eval, "open('harmed', 'w')"),
    "builtins.exec": Calls(exec, "open('harmed', 'w')"),
    "functools.partial": Calls(functools.partial, print, "x"),
    "builtins.getattr": Calls(getattr, "x", "upper"),
    "builtins.open": Calls(builtins.open, "harmed", "w"),
    "_codecs.decode": Calls(codecs.decode, b"x", "rot13"),
    "collections.OrderedDict": OrderedDict(a=1),
    "numpy.load": Calls(np.load, "harmed"),
    "rot13": Calls(codecs.encode, "uryyb", "rot13"),
    "pathlib": Path("x"),
}


def test_a_hostile_pickle_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, protocol in itertools.product(HOSTILE, [0, 2, 4, 5]):
        content = pickle.dumps(HOSTILE[name], protocol)
        with pytest.raises(DataError, match=r"refers to .*which was not run") as caught:
            unpickled(content, "bad.pkl")
        assert name.split(".")[-1] in str(caught.value)
        assert not list(tmp_path.iterdir()), (name, protocol)


def test_arrays_of_objects_fields_and_dates_are_refused():
    refused = [np.array([{}, 1], object), np.array([(1, 2)], "i4,i4"), np.array(["2020"], "M8[D]")]
    for hostile, protocol in itertools.product(refused, [2, 4, 5]):
        with pytest.raises(DataError, match="only"):
            unpickled(pickle.dumps(hostile, protocol), "x")


NDARRAY, DTYPE = b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
CRAFTED = {
    "ndarray called directly": NDARRAY + b"(I9\ntR.",
    "ndarray made by its class": b"\x80\x02" + NDARRAY + b"(I9\nt\x81.",
    "attributes set on what it may call": RECONSTRUCT + b"}U\x01aI1\nsb.",
    "attributes set by slots": RECONSTRUCT + b"(N}U\x0c__defaults__NstU\x01btb.",
    "the function itself": RECONSTRUCT + b".",
    "a type for a value": DTYPE + b"(U\x02u1I0\nI1\ntR.",
    "a name outside": b"Pname\n.",
    "an extension code": b"\x82\x01.",
    "nothing": b"",
    "cut off": pickle.dumps(np.arange(100))[:-30],
    "text": b"hello",
}


def test_crafted_pickles_are_refused():
    for name, content in CRAFTED.items():
        try:
            found = unpickled(content, "bad.pkl")
        except DataError:
            continue
        pytest.fail(f"{name} was read as {found!r}")


def test_lists_that_share_their_parts_stay_small():
    """Forty lists, each of which holds the one before twice, would be a million million when every place is made."""
    content = b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(40)) + b"."
    found = unpickled(content, "x")
    assert found[0] is found[1] and found[0][0] is found[1][1]


def test_content_that_is_used_many_times_is_not_copied_without_end():
    """The bytes of an array stay in the memo, from which any number of arrays could be made."""
    kind = b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntRq\x01"
    content = b"T" + (1000).to_bytes(4, "little") + bytes(1000) + b"q\x02"

    def pickled(arrays: int) -> bytes:
        array = RECONSTRUCT + b"(" + NDARRAY + b"(I0\ntU\x01btR(I1\n(I1000\nth\x01I00\nh\x02tb"
        return kind + b"0" + content + b"0(" + array * arrays + b"t."

    assert [array.shape for array in unpickled(pickled(3), "x")] == [(1000,)] * 3
    with pytest.raises(DataError, match="more than 4 times the size"):
        unpickled(pickled(200), "x")


def test_an_array_must_have_as_many_bytes_as_its_shape_says():
    content = pickle.dumps(np.zeros(10, np.uint8), 2)
    (place,) = (
        position for opcode, argument, position in pickletools.genops(content) if opcode.name == "BININT1" and argument == 10
    )
    with pytest.raises(DataError, match="does not fit"):
        unpickled(content[:place] + b"K\xff" + content[place + 2 :], "x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.pkl"):
        read_pickle(tmp_path / "none.pkl")
