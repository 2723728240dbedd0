"""Digits-Five: ten digits from five sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import (
    Declaration,
    SplitCounts,
    augment_option,
    per_domain_option,
    registered,
    validation_option,
)
from polyfed.data.formats.digit_files import DIGIT_FILES, PACKED_SEED, DigitFiles, Digits
from polyfed.data.store.archives import identities
from polyfed.data.store.cache import Arrays
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.download import RemoteFile
from polyfed.data.store.images import colour
from polyfed.data.store.splits import split_at_test
from polyfed.errors import DataError

SIDE = 28
CLASSES = tuple(str(digit) for digit in range(10))
DOMAINS = ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")
MADE = "SynthDigits (made)"

PACKED = f"packed digits5/*.npz (MNIST, USPS: split 80/20 as by FedBN; others: own parts, shuffled with seed {PACKED_SEED})"
FEDBN_PARTS = "FedBN's prepared folders <domain>/partitions/train_part*.pkl and test.pkl"
FEDBN_WHOLE = "FedBN's prepared folders <domain>/train.pkl and test.pkl"
ORIGINAL = "original files (MNIST idx, SVHN and SynthDigits .mat, USPS .bz2, mnistm_data.pkl), split 80/20 as by FedBN"
GANIN = "MNIST-M as released by Ganin et al. (mnist_m_train/*.png with a label list), own parts"
LAYOUTS = (FEDBN_PARTS, FEDBN_WHOLE, ORIGINAL, GANIN, PACKED)

FEDBN_SIZES = {
    "MNIST": (56_000, 14_000),
    "SVHN": (79_431, 19_858),
    "USPS": (7_438, 1_860),
    "SynthDigits": (391_162, 97_791),
    "MNIST-M": (56_000, 14_000),
}
PACKED_SIZES: Mapping[str, SplitCounts] = {
    "MNIST": {
        "train": (5522, 6302, 5592, 5713, 5459, 5050, 5501, 5834, 5460, 5567),
        "test": (1381, 1575, 1398, 1428, 1365, 1263, 1375, 1459, 1365, 1391),
    },
    "USPS": {
        "train": (1242, 1015, 743, 659, 682, 573, 667, 634, 566, 657),
        "test": (311, 254, 186, 165, 170, 143, 167, 158, 142, 164),
    },
    "SVHN": {
        "train": (527, 1301, 1104, 880, 794, 698, 597, 575, 504, 458),
        "test": (285, 763, 639, 446, 396, 353, 288, 322, 260, 248),
    },
    "MNIST-M": {
        "train": (736, 795, 728, 779, 745, 678, 752, 770, 736, 719),
        "test": (400, 444, 393, 409, 408, 369, 380, 407, 379, 411),
    },
    MADE: {
        "train": (682, 733, 756, 714, 760, 734, 745, 752, 797, 765),
        "test": (393, 388, 366, 394, 398, 411, 431, 375, 416, 428),
    },
}


def _remote(folder: str, mirrors: tuple[str, ...], megabytes: int, md5: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{folder}/{name}", tuple(f"{mirror}/{name}" for mirror in mirrors), f"md5:{digits}", megabytes * 10**6)
        for name, digits in md5.items()
    )


# Checksums as in torchvision.
REMOTE = (
    *_remote(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
        10,
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    *_remote(
        "SVHN",
        ("https://ufldl.stanford.edu/housenumbers", "http://ufldl.stanford.edu/housenumbers"),
        200,
        {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"},
    ),
    *_remote(
        "USPS",
        ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass",),
        10,
        {"usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197", "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118"},
    ),
)


def find(root: Path, per_domain: int, validation: float) -> list[DomainFiles]:
    """Return the five domains below a folder, each in the first layout that exists."""
    return [_domain_files(root, files, per_domain, validation) for files in DIGIT_FILES]


def _domain_files(root: Path, files: DigitFiles, per_domain: int, validation: float) -> DomainFiles:
    readers: list[tuple[str, list[Path], Callable[[list[Path]], Digits]]] = [
        (FEDBN_PARTS, files.parts(root, per_domain), files.read_parts),
        (FEDBN_WHOLE, files.whole(root), files.read_parts),
        (ORIGINAL, files.original(root), files.read_original),
        (GANIN, files.released(root), files.read_released),
        (PACKED, files.packed(root), files.read_packed),
    ]
    for layout, paths, read in readers:
        if paths:
            return DomainFiles(
                domain=MADE if layout == PACKED and files.domain == "SynthDigits" else files.domain,
                layout=layout,
                recipe={"set": "digits_five", "layout": layout, "per_domain": per_domain},
                files=identities(files.source_files(paths)),
                read=partial(_read, read, paths, per_domain),
                split=partial(split_at_test, validation),
            )
    raise DIGITS_FIVE.not_found(root, f"{files.domain} of Digits-Five")


def _read(read: Callable[[list[Path]], Digits], paths: list[Path], per_domain: int, unreadable: list[str]) -> Arrays:
    digits = read(paths)
    train = slice(0, per_domain or None)
    labels = np.concatenate([digits.train_y[train], digits.test_y]).astype(np.int64).reshape(-1)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(CLASSES):
        raise DataError(f"{paths[0]} and the related files contain labels from {labels.min()} to {labels.max()}; expected 0 to 9.")
    x = np.concatenate([colour(digits.train_x[train], SIDE), colour(digits.test_x, SIDE)])
    return {"x": x, "y": labels, "testing_from": np.array(len(digits.train_y[train]))}


DIGITS_FIVE = Declaration(
    name="digits_five",
    about="""Digits-Five: MNIST, SVHN, USPS, SynthDigits and MNIST-M as 28x28 colour images.

    The data is prepared like that of the FedBN authors: the first images of each domain's training order and complete test sets, at
    28x28 pixels, with grey repeated to three channels, and mean and standard deviation 0.5. The prepared folders contain FedBN's split
    (merged, then stratified 80/20 with random state 0). polyfed derives the same split from the original files, and from the packed
    MNIST and USPS, which are complete. The packed SVHN, MNIST-M and SynthDigits are subsets, which keep their test splits and have
    training images shuffled with seed 0. The packed SynthDigits is generated and therefore called "SynthDigits (made)".
    ``per_domain=743`` selects the first of FedBN's ten parts.
    """,
    title="Digits-Five",
    domains=DOMAINS,
    classes=CLASSES,
    splits="FedBN's for prepared folders, original files, and packed MNIST and USPS; other packed files keep their splits",
    terms="MNIST, USPS, MNIST-M: none stated in the sources. SVHN: non-commercial use only, according to its home page.",
    citation="LeCun, Cortes, Burges (MNIST); Netzer et al. 2011 (SVHN); Ganin et al. 2016 (MNIST-M, SynthDigits)",
    layouts=LAYOUTS,
    packed_sha256={
        "digits5/mnist.npz": "7a9e9afe3e5a31a40029aea4d65940367b3e0a32c169095d18883ac86d672e09",
        "digits5/usps.npz": "e9771a12fe68edb565909d10ff8b2bf2be88a0b784193c867192e9874eca4e1a",
        "digits5/svhn.npz": "642782fa32b4897d7d7d968c73a1f5eb19e58314275a008a19b7974cfe0ffdd0",
        "digits5/mnist_m.npz": "73c85a874b7cd2430f01ee78c0899e3429c98f91a8789a1db7933555886cf340",
        "digits5/synth_digits_made.npz": "232a70094632aaaf03e2fa8a3385f7ef688f01e38597a7672440148fda21168e",
    },
    expected={
        PACKED: PACKED_SIZES,
        FEDBN_WHOLE: {name: {"train": train, "test": test} for name, (train, test) in FEDBN_SIZES.items()},
        FEDBN_PARTS: {name: {"train": 7_438, "test": test} for name, (_, test) in FEDBN_SIZES.items()},
        ORIGINAL: {name: {"train": train, "test": test} for name, (train, test) in FEDBN_SIZES.items()},
        GANIN: {"MNIST-M": {"train": 59_001, "test": 9_001}},
    },
    default_model="six_layer_cnn",
    trains_with=TrainsWith(lr=0.1),
    normalisation="half",
    side=SIDE,
    options=(
        per_domain_option(743, "Training images per domain, or fewer if the domain is smaller; 0 means all.", note=lambda kept: ""),
        validation_option("Fraction from the end of the training images used for validation."),
        augment_option("none"),
    ),
    page="https://github.com/med-air/FedBN: its prepared digit data, which includes SynthDigits and MNIST-M; `get` downloads only MNIST, SVHN and USPS",
    files=REMOTE,
    find=find,
    check_with={"per_domain": 0},
)

digits_five = registered(DIGITS_FIVE)
