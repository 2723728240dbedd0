"""Find and read the file formats in which the five digit sets are distributed."""

from __future__ import annotations

import bz2
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyfed.data.formats.unpickle import read_pickle
from polyfed.data.store.archives import read_npz
from polyfed.data.store.images import opened
from polyfed.errors import DataError

BASES = ("", "digit_dataset", "digits5", "data")
FEDBN_PARTS = 10
TEST_SHARE = 0.2
SPLIT_STATE = 0
PACKED_SEED = 0
LIST_ENDING = "_labels.txt"
Labelled: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images and labels."""
IDX_OF_BYTES = 8
USPS_SIDE = 16
SVHN_ZERO = 10


class Digits(NamedTuple):
    """Images (n, height, width) or (n, height, width, 3) and labels, in training order."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[Any]
    test_x: NDArray[np.uint8]
    test_y: NDArray[Any]


@dataclass(frozen=True)
class DigitFiles:
    """The files of one digit domain.

    Attributes:
        folder: Folder name used by FedBN.
        originals: Published files, all of which are required.
        read_all: Reads all images and labels from the published files, training before test.
        release: Names of image folders with a label list next to them, for training and test.
        packed_whole: True if the packed file has the whole data set, so that FedBN's split can be derived from it.
    """

    domain: str
    folder: str
    npz: str
    originals: tuple[str, ...]
    read_all: Callable[[Mapping[str, Path]], Labelled]
    release: tuple[str, ...] = ()
    packed_whole: bool = False

    def packed(self, root: Path) -> list[Path]:
        """Return the packed file, if it exists."""
        return _all_or_none(_first_file(root / base / self.npz for base in BASES))

    def parts(self, root: Path, per_domain: int) -> list[Path]:
        """Return FedBN's training parts and test file, if they have enough images or the undivided file is missing."""
        for folder in self._folders(root):
            test = folder / "test.pkl"
            for inner in (folder / "partitions", folder):
                parts = [path for number in range(FEDBN_PARTS) if (path := inner / f"train_part{number}.pkl").is_file()]
                needed = -(-per_domain * FEDBN_PARTS // 7438) if per_domain else FEDBN_PARTS + 1
                enough = len(parts) >= needed or not (folder / "train.pkl").is_file()
                if parts and test.is_file() and enough:
                    _require_consecutive(parts, inner)
                    return [*parts, test]
        return []

    def whole(self, root: Path) -> list[Path]:
        """Return FedBN's undivided training file and its test file."""
        for folder in self._folders(root):
            pair = [folder / "train.pkl", folder / "test.pkl"]
            if all(path.is_file() for path in pair):
                return pair
        return []

    def original(self, root: Path) -> list[Path]:
        """Return the published files, if all exist."""
        found = []
        for name in self.originals:
            places = [place / name for folder in self._folders(root) for place in (folder / "raw", folder, folder.parent)]
            found.append(_first_file(path for place in places for path in (place, place.with_name(place.name + ".gz"))))
        return _all_or_none(*found)

    def released(self, root: Path) -> list[Path]:
        """Return the label lists of a release of image folders, if all exist."""
        found = []
        for name in self.release:
            places = [place for folder in self._folders(root) for place in (folder, folder.parent, folder.parent / "mnist_m")]
            found.append(_first_file(place / f"{name}{LIST_ENDING}" for place in places))
        return _all_or_none(*found)

    def source_files(self, paths: Sequence[Path]) -> list[Path]:
        """Return all files that determine the content, including the images of a label list."""
        folders = [_image_folder(path) for path in paths if path.name.endswith(LIST_ENDING)]
        return [*paths, *(image for folder in folders if folder.is_dir() for image in sorted(folder.iterdir()))]

    def read_packed(self, paths: Sequence[Path]) -> Digits:
        """Read the packed file. A whole set is split as in FedBN; a subset keeps its splits, with shuffled training images.

        Packed files keep the order of their source, whose first images are not representative: of the first 743 images of USPS,
        34 are fives, instead of the expected 57.
        """
        arrays = read_npz(paths[0])
        missing = [name for name in Digits._fields if name not in arrays]
        if missing:
            raise DataError(f"Cannot read {paths[0]}: it does not contain {missing[0]}. Download the file again.")
        digits = Digits(*(arrays[name] for name in Digits._fields))
        if self.packed_whole:
            x, y = np.concatenate([digits.train_x, digits.test_x]), np.concatenate([digits.train_y, digits.test_y])
            return _split_like_fedbn(x, y, paths[0])
        order = np.random.default_rng(PACKED_SEED).permutation(len(digits.train_y))
        return digits._replace(train_x=digits.train_x[order], train_y=digits.train_y[order])

    def read_parts(self, paths: Sequence[Path]) -> Digits:
        """Read FedBN's pickles: training files in order, then the test file."""
        pairs = [_pair(path) for path in paths]
        train, test = pairs[:-1], pairs[-1]
        return Digits(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), *test)

    def read_original(self, paths: Sequence[Path]) -> Digits:
        """Read the published files, merge them, and split them as the FedBN authors do (stratified, random state 0)."""
        x, y = self.read_all(dict(zip(self.originals, paths, strict=True)))
        return _split_like_fedbn(x, y, paths[0])

    def read_released(self, paths: Sequence[Path]) -> Digits:
        """Read image folders by the label lists next to them. Each line has a file name and a label."""
        (train_x, train_y), (test_x, test_y) = (_read_list(path) for path in paths)
        return Digits(train_x, train_y, test_x, test_y)

    def _folders(self, root: Path) -> list[Path]:
        return [root / base / self.folder for base in BASES]


def _split_like_fedbn(x: NDArray[np.uint8], y: NDArray[Any], path: Path) -> Digits:
    from sklearn.model_selection import StratifiedShuffleSplit

    splitter = StratifiedShuffleSplit(n_splits=1, test_size=TEST_SHARE, random_state=SPLIT_STATE)
    try:
        train, test = next(splitter.split(np.zeros(len(y)), y))
    except ValueError as error:
        raise DataError(f"Cannot split {path} and the related files 80/20 by class: {error}") from error
    return Digits(x[train], y[train], x[test], y[test])


def _require_consecutive(parts: Sequence[Path], folder: Path) -> None:
    expected = [f"train_part{number}.pkl" for number in range(len(parts))]
    gaps = sorted(set(expected) - {path.name for path in parts})
    if gaps:
        raise DataError(f"{folder} lacks {', '.join(gaps)}, so the training images are not consecutive. Download the files again.")


def _first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _all_or_none(*paths: Path | None) -> list[Path]:
    return [path for path in paths if path is not None] if all(paths) else []


def _pair(path: Path) -> Labelled:
    content = read_pickle(path)
    is_pair = isinstance(content, tuple | list) and len(content) == 2
    if not is_pair or not all(isinstance(item, np.ndarray) for item in content) or len(content[0]) != len(content[1]):
        raise DataError(f"{path} does not contain images with their labels: expected a pair of arrays of the same length.")
    return content[0], content[1].reshape(-1)


def _image_folder(label_list: Path) -> Path:
    return label_list.with_name(label_list.name.removesuffix(LIST_ENDING))


def _read_list(path: Path) -> Labelled:
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not rows or any(len(row) != 2 or not row[1].isdigit() for row in rows):
        raise DataError(f"{path} is not a list of 'file label' lines.")
    folder = _image_folder(path)
    try:
        images = [np.asarray(opened((folder / name).read_bytes(), str(folder / name))) for name, _ in rows]
    except OSError as error:
        raise DataError(f"{path} lists a file that cannot be read: {error}.") from error
    if len({image.shape for image in images}) > 1:
        raise DataError(f"The images in {folder} differ in size, unlike those of the release. Download the files again.")
    return np.stack(images), np.array([int(label) for _, label in rows])


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes (MNIST), plain or gzipped."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Cannot read {path}: {error}. Download the file again.") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, IDX_OF_BYTES)):
        raise DataError(
            f"{path} is not an IDX file of bytes: it starts with {content[:4].hex(' ')}, expected 00 00 08 and the number of dimensions."
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} is truncated or too long: {len(content) - start} bytes for the shape {shape}. Download the file again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_mat(path: Path) -> Labelled:
    """Read images (n, height, width, 3) and labels from a MATLAB file with ``X`` and ``y`` (SVHN, SynthDigits). Label 10 means 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), variable_names=["X", "y"])
    except Exception as error:  # scipy may raise any exception for a damaged file
        raise DataError(f"Cannot read {path} as a MATLAB file: {error}. Download the file again.") from error
    if not {"X", "y"} <= content.keys():
        raise DataError(f"{path} contains {', '.join(key for key in content if not key.startswith('__'))}; expected X and y.")
    images, labels = content["X"], content["y"].astype(np.int64).reshape(-1)
    if images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels) or images.dtype != np.uint8:
        raise DataError(
            f"{path} contains X of shape {images.shape} and {len(labels)} labels; expected bytes (height, width, 3, n)."
        )
    labels[labels == SVHN_ZERO] = 0
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels


def read_libsvm(path: Path) -> Labelled:
    """Read grey images (n, 16, 16) and labels of USPS in LIBSVM format, with labels 1 to 10 and pixels from -1 to 1."""
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"Cannot read {path} as bzip2 text: {error}. Download the file again.") from error
    rows = [line.split() for line in lines if line.strip()]
    # A LIBSVM file omits zeros, so the position of a value is the number before the colon.
    pixels = np.zeros((len(rows), USPS_SIDE * USPS_SIDE), np.float32)
    try:
        labels = np.array([int(float(row[0])) - 1 for row in rows], np.int64)
        for place, row in enumerate(rows):
            positions, values = zip(*(pair.split(":") for pair in row[1:]), strict=True)
            pixels[place, np.array(positions, np.int64) - 1] = np.array(values, np.float32)
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is not USPS in LIBSVM format ('label position:value ...'): {error}.") from error
    return ((pixels + 1) / 2 * 255).astype(np.uint8).reshape(-1, USPS_SIDE, USPS_SIDE), labels


def _read_idx_files(paths: Mapping[str, Path]) -> Labelled:
    arrays = [read_idx(path) for path in paths.values()]
    return np.concatenate(arrays[::2]), np.concatenate(arrays[1::2]).astype(np.int64)


def _join(read: Callable[[Path], Labelled], paths: Mapping[str, Path]) -> Labelled:
    pairs = [read(path) for path in paths.values()]
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def _read_mnist_m(paths: Mapping[str, Path]) -> Labelled:
    (path,) = paths.values()
    content = read_pickle(path)
    names = ("train", "valid", "test")
    needed = [key for name in names for key in (name, f"{name}_label")]
    if not isinstance(content, dict) or not all(isinstance(content.get(key), np.ndarray) for key in needed):
        raise DataError(f"{path} does not contain the arrays {', '.join(needed)}.")
    labels = np.concatenate([content[f"{name}_label"].reshape(-1) for name in names])
    return np.concatenate([content[name] for name in names]), labels.astype(np.int64)


DIGIT_FILES = (
    DigitFiles(
        "MNIST",
        "MNIST",
        "mnist.npz",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        _read_idx_files,
        packed_whole=True,
    ),
    DigitFiles("SVHN", "SVHN", "svhn.npz", ("train_32x32.mat", "test_32x32.mat"), partial(_join, read_mat)),
    DigitFiles("USPS", "USPS", "usps.npz", ("usps.bz2", "usps.t.bz2"), partial(_join, read_libsvm), packed_whole=True),
    DigitFiles(
        "SynthDigits",
        "SynthDigits",
        "synth_digits_made.npz",
        ("synth_train_32x32.mat", "synth_test_32x32.mat"),
        partial(_join, read_mat),
    ),
    DigitFiles("MNIST-M", "MNIST_M", "mnist_m.npz", ("mnistm_data.pkl",), _read_mnist_m, ("mnist_m_train", "mnist_m_test")),
)
"""In the order of the FedBN authors."""
