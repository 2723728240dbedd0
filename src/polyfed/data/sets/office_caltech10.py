"""Office-Caltech-10: ten kinds of objects from a shop, a collection and two cameras."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.data.cache import Arrays
from polyfed.data.class_folders import ImageList, SplitLists, find_class_folders, plain, tail
from polyfed.data.declaration import (
    DataOption,
    Declaration,
    SplitCounts,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.domain_files import DomainFiles
from polyfed.data.splits import Splits, stratified, with_validation
from polyfed.data.unpickle import read_pickle
from polyfed.errors import DataError, OptionError

CLASSES = ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector")
CLASS_FOLDERS = {**{plain(name): name for name in CLASSES}, "laptop": "laptop_computer", "headphone": "headphones"}
DOMAINS = ("Amazon", "Caltech", "DSLR", "Webcam")
DOMAIN_FOLDERS = {**{plain(name): name for name in DOMAINS}, "caltech10": "Caltech"}

FOLDER = "folder office_caltech_10/<domain>/<class>/*"
PACKED = "packed office_caltech10_128.tar (resized to 128 pixels)"
LISTS, NO_LISTS = "FedBN's lists", "stratified 80/20 with seed 0"
PACKED_FILE = "office_caltech10_128.tar"
PLACES = {
    FOLDER: ("office_caltech_10", "office_caltech10", "Office_Caltech_DA_Dataset", "OfficeCaltech10", "data/office_caltech_10", ""),
    PACKED: (PACKED_FILE,),
}
LIST_FOLDERS = ("office_caltech_10", "", "data/office_caltech_10")

TEST_SHARE = 0.2
PROTOCOL_TRAIN, PROTOCOL_VALIDATION = 0.5, 0.4
"""FedBN's shares of the smallest domain's training list: 62 and 50 of 125."""

SIZES: Mapping[str, SplitCounts] = {
    "Amazon": {"all": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98), "test": 192},
    "Caltech": {"all": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97), "test": 225},
    "DSLR": {"all": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23), "test": 32},
    "Webcam": {"all": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30), "test": 59},
}


def find(root: Path, size: int, protocol: str, validation: float) -> list[DomainFiles]:
    """The four domains under a folder."""
    if protocol == "fedbn" and validation:
        raise OptionError(
            "office_caltech10: validation has no effect with protocol='fedbn', which takes 50 images a domain. Leave it out."
        )
    folders = find_class_folders(root, PLACES, DOMAIN_FOLDERS, CLASS_FOLDERS)
    if folders is None:
        return []
    lists = {domain: _lists(root, domain) for domain in DOMAINS}
    smallest = min(_training_size(folders.image_list(domain, CLASSES), lists[domain]) for domain in DOMAINS)
    ends = (int(PROTOCOL_TRAIN * smallest), int(PROTOCOL_VALIDATION * smallest)) if protocol == "fedbn" else None
    return folders.domain_files(
        CLASSES, lists, origins=(LISTS, NO_LISTS), data_set="office_caltech10", size=size, split=partial(_split, ends, validation)
    )


def _lists(root: Path, domain: str) -> dict[str, list[str]]:
    """The files each of FedBN's lists names, as ``domain/class/file``; nothing if there are no lists."""
    found = {}
    for kind in ("train", "test"):
        paths = [path for place in LIST_FOLDERS if (path := root / place / f"{domain.lower()}_{kind}.pkl").is_file()]
        if not paths:
            return {}
        content = read_pickle(paths[0])
        pair = content if isinstance(content, tuple | list) and len(content) == 2 else ((), ())
        names = [str(name) for name in pair[0]]
        if not names or not all("/" in name.replace("\\", "/") for name in names):
            raise DataError(f"{paths[0]} does not hold paths with their classes: expected a pair of lists.")
        found[kind] = [tail(name) for name in names]
    return found


def _training_size(images: ImageList, lists: SplitLists) -> int:
    return len(lists["train"]) if lists else len(stratified(images.labels, TEST_SHARE, seed=0)[0])


def _split(ends: tuple[int, int] | None, validation: float, images: ImageList, lists: SplitLists, arrays: Arrays) -> Splits:
    if lists:
        train, test = (images.rows(lists[kind], arrays) for kind in ("train", "test"))
    else:
        train, test = stratified(arrays["y"], TEST_SHARE, seed=0)
    if ends is None:
        return with_validation(train, test, validation)
    return {"train": train[: ends[0]], "validation": train[len(train) - ends[1] :], "test": test}


def _check_protocol(owner: str, protocol: str) -> None:
    if protocol not in ("all", "fedbn"):
        raise OptionError(f"{owner}: protocol is {protocol!r}; it must be 'all' or 'fedbn'.")


OFFICE_CALTECH10 = Declaration(
    name="office_caltech10",
    about="""Office-Caltech-10: ten kinds of objects from Amazon, Caltech-256, a DSLR camera and a webcam.

    FedBN's lists give train and test where they are; else a stratified 80/20 split with seed 0 does, with
    the same sizes of test sets (192, 225, 32, 59) and a shuffled training order. FedBN's protocol
    keeps of each training order the first 62 for training and the last 50 for validation (half and
    two fifths of the smallest domain's 125). Validation images are never augmented here; FedBN's program does.
    """,
    title="Office-Caltech-10",
    domains=DOMAINS,
    classes=CLASSES,
    splits="FedBN's lists where they are, else stratified 80/20 with seed 0",
    terms="none stated; the source asks to cite Gong et al. 2012",
    citation="Gong et al. 2012",
    layouts=(FOLDER, PACKED, "with FedBN's office_caltech_10/<domain>_train.pkl and <domain>_test.pkl for its lists"),
    packed_sha256={PACKED_FILE: "8feadb15f8a014e461282ec1680b1fc6ab1c4587fa0e29cd05d94c9f04aff981"},
    expected={f"{layout}, {split}": SIZES for layout in PLACES for split in (LISTS, NO_LISTS)},
    default_model="alexnet_fedwon",
    options=(
        size_option(128, "Side of the images: 256 in the FedBN and FedWon papers; the packed images have 128."),
        DataOption(
            "protocol",
            "all",
            '"fedbn" (62 for training, 50 for validation) or "all" (the whole training order).',
            check=_check_protocol,
            note=lambda protocol: "FedBN's protocol" if protocol == "fedbn" else "",
        ),
        validation_option('With "all", the share taken from the end of the training order for validation.'),
        augment_option("flip_rotate", "Augmentation of training batches; the papers flip and turn up to 30 degrees."),
        normalise_option("none", "Normalisation; the papers use none."),
    ),
    find=find,
)

office_caltech10 = registered(OFFICE_CALTECH10)
