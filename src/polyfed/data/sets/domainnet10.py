"""DomainNet-10: the ten classes of DomainNet selected by the FedBN authors, from six domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import Declaration, augment_option, normalise_option, registered, size_option, validation_option
from polyfed.data.formats.class_folders import ClassFolders, class_folders, find_class_folders, plain
from polyfed.data.formats.fedbn_lists import ORIGINS, check_fedbn, fedbn_lists, fedbn_split, protocol_option
from polyfed.data.store.archives import joined_archives
from polyfed.data.store.domain_files import DomainFiles

CLASSES = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
DOMAINS = ("Clipart", "Infograph", "Painting", "Quickdraw", "Real", "Sketch")

FOLDER = "folder DomainNet/<domain>/<class>/* (FedBN's ten classes, DomainBed's domain_net/, or all 345 classes)"
PLACES: Mapping[str, tuple[str, ...]] = {FOLDER: ("DomainNet", "domain_net", "domainnet", "data/DomainNet", "")}
ZIPS = "archives clipart.zip, infograph.zip, painting.zip, quickdraw.zip, real.zip and sketch.zip, as they were downloaded"
ZIP_PLACES = ("DomainNet", "", "domain_net", "domainnet", "data/DomainNet")
LIST_FOLDERS = ZIP_PLACES
SHARES = (0.05, 0.05)
"""FedBN's fractions of the smallest training list, for training and validation: about 105 images each."""


def find(root: Path, size: int, protocol: str, validation: float) -> list[DomainFiles]:
    check_fedbn("domainnet10", protocol, validation)
    folders = _folders(root)
    if folders is None:
        return []
    lists = {domain: fedbn_lists(root, LIST_FOLDERS, domain) for domain in DOMAINS}
    split = fedbn_split(folders, CLASSES, lists, SHARES, protocol, validation)
    return folders.domain_files(CLASSES, lists, origins=ORIGINS, data_set="domainnet10", size=size, split=split, other_folders=True)


def _folders(root: Path) -> ClassFolders | None:
    domains, classes = ({plain(name): name for name in names} for names in (DOMAINS, CLASSES))
    unpacked = find_class_folders(root, PLACES, domains, classes)
    if unpacked is not None:
        return unpacked
    zipped = joined_archives(root, ZIP_PLACES, [f"{domain.lower()}.zip" for domain in DOMAINS])
    found = next((found for tree in zipped if (found := class_folders(tree, domains, classes))), None)
    return None if found is None else replace(found, layout=ZIPS)


DOMAINNET10 = Declaration(
    name="domainnet10",
    about="""DomainNet-10: ten classes of DomainNet as clip art, infographics, paintings, quick drawings, photographs and sketches.

    FedBN's lists define train and test. Without them, a stratified 80/20 split with seed 0 is used. With FedBN's protocol, the first
    images of each training order are used for training and the last for validation, each a twentieth of the smallest domain. The
    folders may contain all 345 classes; the other 335 are not read.
    """,
    title="DomainNet-10",
    domains=DOMAINS,
    classes=CLASSES,
    splits="FedBN's lists, or stratified 80/20 with seed 0 without them",
    terms="fair use notice of DomainNet: research only; the owners keep the copyright of the images",
    citation="Peng et al. 2019; Li et al. 2021 (FedBN)",
    layouts=(FOLDER, ZIPS, "with FedBN's DomainNet/<domain>_train.pkl and <domain>_test.pkl for its lists"),
    expected={},
    default_model="alexnet_fedwon",
    trains_with=TrainsWith(lr=0.01),
    options=(
        size_option(256, "Side of the images; 256 in the FedBN and FedWon papers."),
        protocol_option("about 105 each for training and validation"),
        validation_option('With "all", the fraction from the end of the training order used for validation.'),
        augment_option("flip_rotate", "Augmentation of training batches; the papers flip and rotate by up to 30 degrees."),
        normalise_option("none", "Normalisation; the papers use none."),
    ),
    page="https://ai.bu.edu/M3SDA/: the six zips (packed, or unpacked to DomainNet/<domain>/<class>/*); FedBN's lists from https://github.com/med-air/FedBN",
    find=find,
)

domainnet10 = registered(DOMAINNET10)
