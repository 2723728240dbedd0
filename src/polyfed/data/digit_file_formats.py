"""Readers of the files in which the digit data sets were published: IDX, MATLAB and LIBSVM."""

from __future__ import annotations

import bz2
import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import DataError

IDX_OF_BYTES = 8
USPS_SIDE = 16
SVHN_ZERO = 10


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes (MNIST), plain or gzipped."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Cannot read {path}: {error}. Get the file again.") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, IDX_OF_BYTES)):
        raise DataError(
            f"{path} is no IDX file of bytes: it starts with {content[:4].hex(' ')}, expected 00 00 08 and the dimensions."
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} is cut off or too long: {len(content) - start} bytes of content for the shape {shape}. Get the file again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_mat(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, height, width, 3) and labels of a MATLAB file with ``X`` and ``y`` (SVHN, SynthDigits); label 10 is 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), variable_names=["X", "y"])
    except Exception as error:  # scipy's reader raises whatever a damaged file makes its parser trip over
        raise DataError(f"Cannot read {path} as a MATLAB file: {error}. Get the file again.") from error
    if not {"X", "y"} <= content.keys():
        raise DataError(f"{path} holds {', '.join(key for key in content if not key.startswith('__'))}; expected X and y.")
    images, labels = content["X"], content["y"].astype(np.int64).reshape(-1)
    if images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels) or images.dtype != np.uint8:
        raise DataError(f"{path} holds X of shape {images.shape} and {len(labels)} labels; expected bytes (height, width, 3, n).")
    labels[labels == SVHN_ZERO] = 0
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels


def read_libsvm(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey images (n, 16, 16) and labels of USPS in LIBSVM form: labels 1 to 10, pixels -1 to 1."""
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"Cannot read {path} as bzip2 text: {error}. Get the file again.") from error
    rows = [line.split() for line in lines if line.strip()]
    # A LIBSVM file leaves zeros out, so values go by the number before the colon.
    pixels = np.zeros((len(rows), USPS_SIDE * USPS_SIDE), np.float32)
    try:
        labels = np.array([int(float(row[0])) - 1 for row in rows], np.int64)
        for place, row in enumerate(rows):
            positions, values = zip(*(pair.split(":") for pair in row[1:]), strict=True)
            pixels[place, np.array(positions, np.int64) - 1] = np.array(values, np.float32)
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is not USPS in LIBSVM form ('label position:value ...'): {error}.") from error
    return ((pixels + 1) / 2 * 255).astype(np.uint8).reshape(-1, USPS_SIDE, USPS_SIDE), labels
