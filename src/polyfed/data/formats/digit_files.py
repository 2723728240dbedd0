"""The files in which people have the five digit sets, and how each is read."""

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
Pool: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images and labels."""
IDX_OF_BYTES = 8
USPS_SIDE = 16
SVHN_ZERO = 10


class Digits(NamedTuple):
    """Images (n, height, width) or (n, height, width, 3) and labels, in the order of the training set."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[Any]
    test_x: NDArray[np.uint8]
    test_y: NDArray[Any]


@dataclass(frozen=True)
class DigitFiles:
    """The files of one digit domain.

    Args:
        domain: Its name.
        folder: FedBN's name of its folder.
        npz: The packed file.
        originals: The published files, all of which are needed.
        pooled: Reads the published files into all images and labels, training before test.
        release: Names of the folders of images with a label list next to them, for training and test.
        packed_whole: Whether the packed file holds the whole data set, so that FedBN's split can be made from it.
    """

    domain: str
    folder: str
    npz: str
    originals: tuple[str, ...]
    pooled: Callable[[Mapping[str, Path]], Pool]
    release: tuple[str, ...] = ()
    packed_whole: bool = False

    def packed(self, root: Path) -> list[Path]:
        """The packed file, if it is there."""
        return _all_or_none(_first_file(root / base / self.npz for base in BASES))

    def parts(self, root: Path, per_domain: int) -> list[Path]:
        """FedBN's test file and as many training parts as exist, if they hold enough or there is nothing with more."""
        for folder in self._folders(root):
            test = folder / "test.pkl"
            for inner in (folder / "partitions", folder):
                parts = [path for number in range(FEDBN_PARTS) if (path := inner / f"train_part{number}.pkl").is_file()]
                wanted = -(-per_domain * FEDBN_PARTS // 7438) if per_domain else FEDBN_PARTS + 1
                enough = len(parts) >= wanted or not (folder / "train.pkl").is_file()
                if parts and test.is_file() and enough:
                    _consecutive(parts, inner)
                    return [*parts, test]
        return []

    def whole(self, root: Path) -> list[Path]:
        """FedBN's undivided training file and its test file."""
        for folder in self._folders(root):
            pair = [folder / "train.pkl", folder / "test.pkl"]
            if all(path.is_file() for path in pair):
                return pair
        return []

    def original(self, root: Path) -> list[Path]:
        """The published files, if all are there."""
        found = []
        for name in self.originals:
            places = [place / name for folder in self._folders(root) for place in (folder / "raw", folder, folder.parent)]
            found.append(_first_file(path for place in places for path in (place, place.with_name(place.name + ".gz"))))
        return _all_or_none(*found)

    def released(self, root: Path) -> list[Path]:
        """The label lists of a release of image folders, if all are there."""
        found = []
        for name in self.release:
            places = [place for folder in self._folders(root) for place in (folder, folder.parent, folder.parent / "mnist_m")]
            found.append(_first_file(place / f"{name}{LIST_ENDING}" for place in places))
        return _all_or_none(*found)

    def behind(self, paths: Sequence[Path]) -> list[Path]:
        """All files that decide what is read: of a label list also the images in the folder it describes."""
        folders = [_described(path) for path in paths if path.name.endswith(LIST_ENDING)]
        return [*paths, *(image for folder in folders if folder.is_dir() for image in sorted(folder.iterdir()))]

    def read_packed(self, paths: Sequence[Path]) -> Digits:
        """Read the packed file: a whole set is split as by FedBN, a subset keeps its parts and its training part is shuffled.

        A packed file has the order of its source, and the first images of that are no fair sample: of USPS's first 743,
        34 are fives, where its share would be 57.
        """
        arrays = read_npz(paths[0])
        missing = [name for name in Digits._fields if name not in arrays]
        if missing:
            raise DataError(f"{paths[0]} cannot be read: it holds no {missing[0]}. Get the file again.")
        digits = Digits(*(arrays[name] for name in Digits._fields))
        if self.packed_whole:
            pool = np.concatenate([digits.train_x, digits.test_x]), np.concatenate([digits.train_y, digits.test_y])
            return _split_as_fedbn(*pool, paths[0])
        order = np.random.default_rng(PACKED_SEED).permutation(len(digits.train_y))
        return digits._replace(train_x=digits.train_x[order], train_y=digits.train_y[order])

    def read_parts(self, paths: Sequence[Path]) -> Digits:
        """Read FedBN's pickles: training files in order, the test file last."""
        pairs = [_pair(path) for path in paths]
        train, test = pairs[:-1], pairs[-1]
        return Digits(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), *test)

    def read_original(self, paths: Sequence[Path]) -> Digits:
        """Read the published files and split them as the FedBN authors did: merged, stratified, state 0."""
        x, y = self.pooled(dict(zip(self.originals, paths, strict=True)))
        return _split_as_fedbn(x, y, paths[0])

    def read_released(self, paths: Sequence[Path]) -> Digits:
        """Read folders of images by the lists next to them, each line a file and its label."""
        (train_x, train_y), (test_x, test_y) = (_listed(path) for path in paths)
        return Digits(train_x, train_y, test_x, test_y)

    def _folders(self, root: Path) -> list[Path]:
        return [root / base / self.folder for base in BASES]


def _split_as_fedbn(x: NDArray[np.uint8], y: NDArray[Any], path: Path) -> Digits:
    from sklearn.model_selection import StratifiedShuffleSplit

    splitter = StratifiedShuffleSplit(n_splits=1, test_size=TEST_SHARE, random_state=SPLIT_STATE)
    try:
        train, test = next(splitter.split(np.zeros(len(y)), y))
    except ValueError as error:
        raise DataError(f"{path} and its companions cannot be split 80/20 by class: {error}") from error
    return Digits(x[train], y[train], x[test], y[test])


def _consecutive(parts: Sequence[Path], folder: Path) -> None:
    expected = [f"train_part{number}.pkl" for number in range(len(parts))]
    gaps = sorted(set(expected) - {path.name for path in parts})
    if gaps:
        raise DataError(f"{folder} lacks {', '.join(gaps)}, so the order of training images is broken. Get the files again.")


def _first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _all_or_none(*paths: Path | None) -> list[Path]:
    return [path for path in paths if path is not None] if all(paths) else []


def _pair(path: Path) -> Pool:
    content = read_pickle(path)
    is_pair = isinstance(content, tuple | list) and len(content) == 2
    if not is_pair or not all(isinstance(item, np.ndarray) for item in content) or len(content[0]) != len(content[1]):
        raise DataError(f"{path} does not hold images with their labels: expected a pair of arrays of the same length.")
    return content[0], content[1].reshape(-1)


def _described(label_list: Path) -> Path:
    return label_list.with_name(label_list.name.removesuffix(LIST_ENDING))


def _listed(path: Path) -> Pool:
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not rows or any(len(row) != 2 or not row[1].isdigit() for row in rows):
        raise DataError(f"{path} is no list of 'file label' lines.")
    folder = _described(path)
    try:
        images = [np.asarray(opened((folder / name).read_bytes(), str(folder / name))) for name, _ in rows]
    except OSError as error:
        raise DataError(f"{path} names a file that cannot be read: {error}.") from error
    if len({image.shape for image in images}) > 1:
        raise DataError(f"The images of {folder} differ in size; the release has one size.")
    return np.stack(images), np.array([int(label) for _, label in rows])


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


def read_mat(path: Path) -> Pool:
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


def read_libsvm(path: Path) -> Pool:
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


def _idx_pool(paths: Mapping[str, Path]) -> Pool:
    arrays = [read_idx(path) for path in paths.values()]
    return np.concatenate(arrays[::2]), np.concatenate(arrays[1::2]).astype(np.int64)


def _joined_pairs(read: Callable[[Path], Pool], paths: Mapping[str, Path]) -> Pool:
    pairs = [read(path) for path in paths.values()]
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def _pickle_pool(paths: Mapping[str, Path]) -> Pool:
    (path,) = paths.values()
    content = read_pickle(path)
    names = ("train", "valid", "test")
    needed = [key for name in names for key in (name, f"{name}_label")]
    if not isinstance(content, dict) or not all(isinstance(content.get(key), np.ndarray) for key in needed):
        raise DataError(f"{path} does not hold the arrays {', '.join(needed)}.")
    labels = np.concatenate([content[f"{name}_label"].reshape(-1) for name in names])
    return np.concatenate([content[name] for name in names]), labels.astype(np.int64)


DIGIT_FILES = (
    DigitFiles(
        "MNIST",
        "MNIST",
        "mnist.npz",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        _idx_pool,
        packed_whole=True,
    ),
    DigitFiles("SVHN", "SVHN", "svhn.npz", ("train_32x32.mat", "test_32x32.mat"), partial(_joined_pairs, read_mat)),
    DigitFiles("USPS", "USPS", "usps.npz", ("usps.bz2", "usps.t.bz2"), partial(_joined_pairs, read_libsvm), packed_whole=True),
    DigitFiles(
        "SynthDigits",
        "SynthDigits",
        "synth_digits_made.npz",
        ("synth_train_32x32.mat", "synth_test_32x32.mat"),
        partial(_joined_pairs, read_mat),
    ),
    DigitFiles("MNIST-M", "MNIST_M", "mnist_m.npz", ("mnistm_data.pkl",), _pickle_pool, ("mnist_m_train", "mnist_m_test")),
)
"""In the order of the FedBN authors."""
