"""Office-Caltech-10: ten kinds of objects from a shop, an image collection and two cameras."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import (
    Declaration,
    SplitCounts,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.formats.class_folders import find_class_folders, plain
from polyfed.data.formats.fedbn_lists import ORIGINS, check_fedbn, fedbn_lists, fedbn_split, protocol_option
from polyfed.data.store.domain_files import DomainFiles

CLASSES = ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector")
CLASS_FOLDERS = {**{plain(name): name for name in CLASSES}, "laptop": "laptop_computer", "headphone": "headphones"}
DOMAINS = ("Amazon", "Caltech", "DSLR", "Webcam")
DOMAIN_FOLDERS = {**{plain(name): name for name in DOMAINS}, "caltech10": "Caltech"}

FOLDER = "folder office_caltech_10/<domain>/<class>/*"
PACKED = "packed office_caltech10_128.tar (resized to 128 pixels)"
PACKED_FILE = "office_caltech10_128.tar"
PLACES = {
    FOLDER: ("office_caltech_10", "office_caltech10", "Office_Caltech_DA_Dataset", "OfficeCaltech10", "data/office_caltech_10", ""),
    PACKED: (PACKED_FILE,),
}
LIST_FOLDERS = ("office_caltech_10", "", "data/office_caltech_10")

SHARES = (0.5, 0.4)
"""FedBN's fractions of the smallest training list, for training and validation: 62 and 50 of 125."""

SIZES: Mapping[str, SplitCounts] = {
    "Amazon": {"all": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98), "test": 192},
    "Caltech": {"all": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97), "test": 225},
    "DSLR": {"all": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23), "test": 32},
    "Webcam": {"all": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30), "test": 59},
}


def find(root: Path, size: int, protocol: str, validation: float) -> list[DomainFiles]:
    check_fedbn("office_caltech10", protocol, validation)
    folders = find_class_folders(root, PLACES, DOMAIN_FOLDERS, CLASS_FOLDERS)
    if folders is None:
        return []
    lists = {domain: fedbn_lists(root, LIST_FOLDERS, domain) for domain in DOMAINS}
    split = fedbn_split(folders, CLASSES, lists, SHARES, protocol, validation)
    return folders.domain_files(CLASSES, lists, origins=ORIGINS, data_set="office_caltech10", size=size, split=split)


OFFICE_CALTECH10 = Declaration(
    name="office_caltech10",
    about="""Office-Caltech-10: ten kinds of objects from Amazon, Caltech-256, a DSLR camera and a webcam.

    FedBN's lists define train and test. Without them, a stratified 80/20 split with seed 0 is used, with the same test set sizes
    (192, 225, 32, 59) and a shuffled training order. With FedBN's protocol, the first 62 images of each training order are used for
    training and the last 50 for validation (half and two fifths of the smallest domain, which has 125). Validation images are not
    augmented, unlike in the authors' code.
    """,
    title="Office-Caltech-10",
    domains=DOMAINS,
    classes=CLASSES,
    splits="FedBN's lists, or stratified 80/20 with seed 0 without them",
    terms="none stated; the source asks to cite Gong et al. 2012",
    citation="Gong et al. 2012",
    layouts=(FOLDER, PACKED, "with FedBN's office_caltech_10/<domain>_train.pkl and <domain>_test.pkl for its lists"),
    packed_sha256={PACKED_FILE: "8feadb15f8a014e461282ec1680b1fc6ab1c4587fa0e29cd05d94c9f04aff981"},
    expected={f"{layout}, {split}": SIZES for layout in PLACES for split in ORIGINS},
    default_model="alexnet_fedwon",
    trains_with=TrainsWith(lr=0.01),
    options=(
        size_option(128, "Side of the images: 256 in the FedBN and FedWon papers. Packed images have 128."),
        protocol_option("62 for training, 50 for validation"),
        validation_option('With "all", the fraction from the end of the training order used for validation.'),
        augment_option("flip_rotate", "Augmentation of training batches; the papers flip and rotate by up to 30 degrees."),
        normalise_option("none", "Normalisation; the papers use none."),
    ),
    page="https://github.com/med-air/FedBN (data/office_caltech_10 with its lists), or only the images as office_caltech_10/<domain>/<class>/*",
    find=find,
)

office_caltech10 = registered(OFFICE_CALTECH10)
